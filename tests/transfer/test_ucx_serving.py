"""A pool is sent to those who were given its endpoint, and whatever else arrives does no harm.

The worker of a source can be reached by anybody who reaches its port: what it is sent is untrusted.
"""

import ctypes
import math
import random
import select
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from core.errors import TransferError
from core.ids import Incarnation, ReadId
from core.messages import PoolEndpoint
from transfer.descriptors import Pool, describe
from transfer.transport import Extent
from transfer.ucx_bindings import FAIL_PEER, RequestParams, Ucp, UcxStatusError
from transfer.ucx_library import load_ucx
from transfer.ucx_reads import MessageReads
from transfer.ucx_serving import PoolServer
from transfer.ucx_transport import UcxTransport
from transfer.ucx_wire import (
    REQUEST_TAG,
    TOKEN_NBYTES,
    PoolAddress,
    ReadRequest,
    decode_address,
    decode_request,
    encode_address,
    encode_request,
    requested_parts,
)
from transfer.ucx_worker import UcxContext

pytestmark = [pytest.mark.ucx]

NBYTES = 64 * 1024
TOKEN = b"t" * TOKEN_NBYTES
CANARY = 0x5A
OPTIONS = {"TLS": "tcp", "KEEPALIVE_INTERVAL": "inf"}
"""A keepalive would wake a source that has missed a request."""
BOUND_S = 60.0
"""A guard against hanging, and no more."""


class Pair:
    """A source and a reader in this process, over TCP, driven by hand."""

    def __init__(self, token: bytes = TOKEN) -> None:
        self.context = UcxContext(Ucp(load_ucx()), OPTIONS)
        self.theirs = np.arange(NBYTES, dtype=np.uint32).astype(np.uint8)
        self.mine = np.full(NBYTES, CANARY, dtype=np.uint8)
        self.remote = Pool(self.theirs.ctypes.data, NBYTES)
        self.local = Pool(self.mine.ctypes.data, NBYTES)
        self.server = PoolServer(self.context.open_worker(), self.remote, TOKEN)
        self.worker = self.context.open_worker()
        self.to_source = self.worker.connect(self.server.worker.address(), FAIL_PEER)
        address = PoolAddress(1, "", self.server.worker.address(), b"", token)
        self.reads = MessageReads(
            self.worker, self.to_source, address, self.local, self.remote.address
        )
        self._sent: list[bytes] = []

    def drive(self) -> list[ReadId]:
        """Give both sides a moment; return what landed."""
        self.server.progress(limit_s=0.001)
        self.worker.progress(limit_s=0.001)
        return self.reads.take_landed()

    def turn(self, for_s: float = 0.05) -> list[ReadId]:
        """Drive both sides for a while, for what must not come; return what landed."""
        landed: list[ReadId] = []
        deadline = time.monotonic() + for_s
        while time.monotonic() < deadline:
            landed += self.drive()
        return landed

    def land(self) -> list[ReadId]:
        """Drive both sides until something lands, and a while longer; return all that landed."""
        landed: list[ReadId] = []

        def has_come() -> bool:
            landed.extend(self.drive())
            return bool(landed)

        until(has_come)
        return landed + self.turn()

    def refuse(self, count: int) -> None:
        """Drive both sides until ``count`` requests were refused in all; nothing must land."""
        until(lambda: self.drive() == [] and self.server.num_refused >= count)
        assert self.turn() == []
        assert self.server.num_refused == count

    def send(self, message: bytes) -> None:
        """Send the source whatever it is."""
        self._sent.append(message)
        self.context.ucp.short("ucp_tag_send_nbx")(
            self.to_source, message, len(message), REQUEST_TAG, ctypes.byref(RequestParams())
        )

    def read(self, extents: list[Extent], number: int = 1) -> ReadId:
        self.reads.post(ReadId(number), describe(extents, self.local, self.remote))
        return ReadId(number)

    def request(self, **changes: object) -> ReadRequest:
        fields = {
            "tag": 77,
            "reader": self.worker.address(),
            "extents": np.array([[0, 64]], dtype="<u8").tobytes(),
        }
        return ReadRequest(**{**fields, **changes})  # type: ignore[arg-type]

    def close(self) -> None:
        self.server.close()
        self.worker.destroy()
        self.context.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come"


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_a_read_gets_its_extents_in_their_places(pair: Pair) -> None:
    read = pair.read([Extent(100, 5000, 10), Extent(7, 0, 3)])
    assert pair.land() == [read]
    want = np.full(NBYTES, CANARY, dtype=np.uint8)
    want[100:110], want[7:10] = pair.theirs[5000:5010], pair.theirs[:3]
    assert (pair.mine == want).all()
    assert pair.server.num_readers == 1


def test_malformed_requests_are_refused_and_the_next_is_served(pair: Pair) -> None:
    rng = random.Random(11)
    valid = encode_request(pair.request(), TOKEN)
    messages = [rng.randbytes(rng.randint(0, 300)) for _ in range(60)]
    messages += [valid[: rng.randint(0, len(valid) - 1)] for _ in range(60)]
    for message in messages:
        pair.send(message)
    pair.refuse(len(messages))
    assert pair.server.num_readers == 0
    read = pair.read([Extent(0, 0, 64)])
    assert pair.land() == [read]


def test_a_request_with_any_byte_flipped_never_reaches_ucx(pair: Pair) -> None:
    """UCX aborts the whole process on a damaged address of a reader (``address.c``)."""
    rng = random.Random(5)
    valid = encode_request(pair.request(), TOKEN)
    for at in range(len(valid)):
        damaged = bytearray(valid)
        damaged[at] ^= 1 << rng.randrange(8)
        assert decode_request(bytes(damaged), TOKEN) is None
        pair.send(bytes(damaged))
        pair.turn(0.002)
    pair.refuse(len(valid))
    assert pair.server.num_readers == 0
    read = pair.read([Extent(0, 0, 64)])
    assert pair.land() == [read]


def test_the_token_is_in_no_request(pair: Pair) -> None:
    """The network sees requests: what it sees must not do for another one."""
    read = pair.read([Extent(0, 0, 64)])
    message = pair.reads._messages[read].request
    assert TOKEN not in message
    other = encode_request(pair.request(tag=78), TOKEN)
    assert decode_request(message[:32] + other[32:], TOKEN) is None


def test_refused_requests_fill_no_log(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.refusals.LOG_INTERVAL_S", math.inf)
    for _ in range(50):
        pair.send(b"?")
    pair.refuse(50)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_request_without_the_pools_token_gets_nothing() -> None:
    pair = Pair(token=b"?" * TOKEN_NBYTES)
    pair.read([Extent(0, 0, 64)])
    pair.refuse(1)
    assert (pair.mine == CANARY).all()
    assert pair.server.num_readers == 0
    pair.close()


@pytest.mark.parametrize(
    "extents",
    [
        [[0, NBYTES + 1]],
        [[NBYTES, 1]],
        [[2**64 - 1, 2]],
        [[0, 64], [NBYTES - 3, 4]],
        [[64, 2**64 - 64]],
    ],
)
def test_bytes_outside_of_the_pool_are_never_sent(pair: Pair, extents: list[list[int]]) -> None:
    wanted = np.array(extents, dtype="<u8").tobytes()
    assert requested_parts(pair.request(extents=wanted), pair.remote) is None
    pair.send(encode_request(pair.request(extents=wanted), TOKEN))
    pair.refuse(1)


def test_a_refused_reader_is_told(pair: Pair) -> None:
    """It asked for what it thinks is in the pool: a source that shrank, or a bug."""
    pair.server._pool = Pool(pair.remote.address, 32)
    pair.read([Extent(0, 0, 64)])
    with pytest.raises(UcxStatusError, match="0 of 64 bytes"):
        pair.land()


def test_a_replayed_or_duplicated_request_lands_nowhere(pair: Pair) -> None:
    """The answer has a tag that nobody waits for any more: not one byte is written."""
    first = pair.read([Extent(0, 0, 64)])
    replay = pair.reads._messages[first].request
    assert pair.land() == [first]
    pair.mine[:] = CANARY
    for _ in range(3):
        pair.send(replay)
    assert pair.turn() == []
    assert (pair.mine == CANARY).all()
    second = pair.read([Extent(0, 0, 64)], number=2)
    assert pair.land() == [second]
    assert (pair.mine[64:] == CANARY).all()


def test_readers_that_end_are_forgotten(pair: Pair) -> None:
    read = pair.read([Extent(0, 0, 64)])
    assert pair.land() == [read]
    assert pair.server.num_readers == 1
    pair.worker.disconnect(pair.to_source)
    pair.reads = MessageReads(
        pair.worker,
        pair.to_source,
        PoolAddress(1, "", b"", b"", TOKEN),
        pair.local,
        pair.remote.address,
    )
    pair.worker.destroy()

    def is_forgotten() -> bool:
        pair.server.progress(limit_s=0.001)
        return pair.server.num_readers == 0

    until(is_forgotten)


def test_a_damaged_endpoint_never_reaches_ucx() -> None:
    address = PoolAddress(1, "host", b"worker", b"key", TOKEN)
    metadata = encode_address(address)
    assert decode_address(metadata) == address
    rng = random.Random(3)
    for _ in range(200):
        damaged = bytearray(metadata)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        with pytest.raises(TransferError, match="damaged"):
            decode_address(bytes(damaged))
    for length in range(len(metadata)):
        with pytest.raises(TransferError):
            decode_address(metadata[:length])


def test_another_major_version_of_ucx_is_refused_with_both_named() -> None:
    transport = UcxTransport(Incarnation("x"), ucx_options={"TLS": "tcp"})
    pool = np.zeros(4096, dtype=np.uint8)
    transport.register(pool.ctypes.data, pool.nbytes)
    metadata = encode_address(PoolAddress(2, "", b"w", b"k", TOKEN))
    with pytest.raises(TransferError, match=r"runs UCX 2\.x, here it is 1\."):
        transport.connect(Incarnation("p"), PoolEndpoint("ucx", metadata, 1, 1))
    transport.close()


def test_a_request_that_comes_while_the_server_is_at_work_is_answered_before_it_sleeps(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX tells of a message once: one that a last progress brings would wait for the next event.

    Else a read hangs until its timeout, though both sides are well.
    """
    # Given a connected reader, a source that sleeps, and the next request before it
    first = pair.read([Extent(0, 0, 64)])
    assert pair.land() == [first]
    worker, progress = pair.server.worker, pair.server.worker.progress

    def sleep() -> None:
        while not worker.arm():
            pair.server.progress(limit_s=0.001)

    def is_woken() -> bool:
        pair.worker.progress(limit_s=0.001)
        return bool(select.select([worker.descriptor], [], [], 0)[0])

    sleep()
    second = pair.read([Extent(64, 64, 64)], number=2)
    until(is_woken)

    # When only the second progress of the source's turn brings it
    calls: list[float] = []

    def late(*, limit_s: float) -> bool:
        calls.append(limit_s)
        if len(calls) == 1:
            worker.touch()  # as an answer that was just sent does
            return False
        return progress(limit_s=limit_s)

    monkeypatch.setattr(worker, "progress", late)
    pair.server.progress(limit_s=0.001)
    sleep()

    # Then it is answered by a source that does nothing but when it is woken
    landed: list[ReadId] = []

    def is_landed() -> bool:
        if is_woken():
            pair.server.progress(limit_s=0.001)
            sleep()
        landed.extend(pair.reads.take_landed())
        return bool(landed)

    until(is_landed)
    assert landed == [second]
