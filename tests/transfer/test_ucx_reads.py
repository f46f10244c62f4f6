"""A read ends exactly once, also when UCX refuses the next one: lost ones hold blocks for ever."""

from collections.abc import Iterator

import numpy as np
import pytest

from core.ids import ReadId
from transfer.descriptors import Pool, describe
from transfer.transport import Extent
from transfer.ucx_bindings import (
    FAIL_PEER,
    IN_PROGRESS,
    MESSAGES,
    REMOTE_MEMORY,
    Ucp,
    UcxStatusError,
)
from transfer.ucx_library import load_ucx
from transfer.ucx_reads import OneSidedReads, Window
from transfer.ucx_wire import PoolAddress
from transfer.ucx_worker import UcxContext

pytestmark = [pytest.mark.ucx]

NBYTES = 4096
_NO_MEMORY = 2**64 - 4
"""``UCS_ERR_NO_MEMORY`` as ``ucp_get_nbx`` returns it."""


class Pair:
    """A source and a reader in this process. Emulated reads over TCP are never over at once."""

    def __init__(self) -> None:
        features = MESSAGES | REMOTE_MEMORY
        self.context = UcxContext(Ucp(load_ucx()), {"TLS": "tcp"}, features=features)
        self.bytes = np.arange(2 * NBYTES, dtype=np.uint32).astype(np.uint8)
        address = self.bytes.ctypes.data
        key = self.context.map_memory(address, self.bytes.nbytes, "host")
        self.mine, self.theirs = Pool(address, NBYTES), Pool(address + NBYTES, NBYTES)
        self.source = self.context.open_worker()
        self.worker = self.context.open_worker()
        endpoint = self.worker.connect(self.source.address(), FAIL_PEER)
        source = PoolAddress(1, "", self.source.address(), key, b"")
        window = Window(nbytes=NBYTES, requests=1)
        self.reads = OneSidedReads(self.worker, endpoint, source, self.mine, window)

    def post(self, number: int) -> ReadId:
        extents = [Extent(64 * number, 64 * number, 64)]
        self.reads.post(ReadId(number), describe(extents, self.mine, self.theirs))
        return ReadId(number)

    def finish(self, read: ReadId) -> None:
        """Let the posted extents of ``read`` land."""
        while any(
            self.reads._status(request) == IN_PROGRESS
            for request, _ in self.reads._reads[read].posted
        ):
            self.source.progress(limit_s=0.001)
            self.worker.progress(limit_s=0.001)

    def close(self) -> None:
        self.reads.release()
        self.worker.destroy()
        self.source.destroy()
        self.context.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_what_has_landed_is_told_and_the_next_is_posted(pair: Pair) -> None:
    first, second = pair.post(1), pair.post(2)
    pair.finish(first)
    assert pair.reads.take_landed() == [first]
    pair.finish(second)
    assert pair.reads.take_landed() == [second]
    assert (pair.bytes[64:192] == pair.bytes[NBYTES + 64 : NBYTES + 192]).all()


def test_a_landed_read_is_not_lost_when_the_next_cannot_be_posted(pair: Pair) -> None:
    """The caller fails the peer with all that is pending: what is in neither list never ends."""
    first, second = pair.post(1), pair.post(2)
    pair.finish(first)
    pair.reads._get = lambda *_: _NO_MEMORY
    with pytest.raises(UcxStatusError):
        pair.reads.take_landed()
    assert pair.reads.pending() == [first, second]
