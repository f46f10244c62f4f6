"""Whoever reaches a worker's TCP port must not read its memory, and few workers have one.

UCX emulates one-sided reads over TCP, for anybody, of any address, without a key. The second test
shows the attack on a context as UCX would open it; the first that ours is not open to it.
"""

import ctypes
import time
from collections.abc import Mapping

import numpy as np
import psutil
import pytest

from core.ids import Incarnation
from tests.transfer.transport_cases import CANARY
from transfer.transport import Extent
from transfer.ucx_bindings import (
    FAIL_FATAL,
    IN_PROGRESS,
    MESSAGES,
    OK,
    REMOTE_MEMORY,
    RequestParams,
    Ucp,
)
from transfer.ucx_contexts import without_tcp
from transfer.ucx_library import load_ucx
from transfer.ucx_transport import UcxTransport
from transfer.ucx_worker import UcxContext, UcxWorker

pytestmark = [pytest.mark.ucx]

TCP: Mapping[str, str] = {"TLS": "tcp"}
NBYTES = 4096


class Stranger:
    """Speaks UCX, knows an address of a worker and one of memory, and was given no key."""

    def __init__(self, ucp: Ucp, target: bytes) -> None:
        self.ucp = ucp
        self.context = UcxContext(ucp, TCP, features=REMOTE_MEMORY)
        self.mine = np.full(NBYTES, CANARY, dtype=np.uint8)
        key = self.context.map_memory(self.mine.ctypes.data, NBYTES, "host")
        self.worker = self.context.open_worker()
        self.endpoint = self.worker.connect(target, FAIL_FATAL)
        unpack = ucp.short("ucp_ep_rkey_unpack")
        self.key = ucp.handle("key", unpack, self.endpoint, key)

    def attack(self, address: int, served: UcxWorker, *, for_s: float) -> int:
        """Read ``address``; return the status of that when it is over, or after ``for_s``."""
        got = self.ucp.short("ucp_get_nbx")(
            self.endpoint,
            self.mine.ctypes.data,
            64,
            address,
            self.key,
            ctypes.byref(RequestParams()),
        )
        deadline = time.monotonic() + for_s
        while (status := self._status(got)) == IN_PROGRESS and time.monotonic() < deadline:
            self.worker.progress(limit_s=0)
            served.progress(limit_s=0)
        return status

    def _status(self, request: int | None) -> int:
        return int(self.ucp.short("ucp_request_check_status")(request)) if request else OK

    def close(self) -> None:
        self.ucp.short("ucp_rkey_destroy")(self.key)
        self.worker.destroy()
        self.context.close()


@pytest.fixture
def secret() -> np.ndarray:
    return np.full(NBYTES, 7, dtype=np.uint8)


@pytest.fixture
def ucp() -> Ucp:
    return Ucp(load_ucx())


@pytest.mark.parametrize("options", [TCP, {}], ids=["tcp", "all"])
def test_a_stranger_reads_nothing(ucp: Ucp, secret: np.ndarray, options: Mapping[str, str]) -> None:
    transport = UcxTransport(Incarnation("x"), ucx_options=options)
    transport.register(secret.ctypes.data, NBYTES)
    assert transport._server is not None
    served = transport._server.worker
    stranger = Stranger(ucp, served.address())
    assert stranger.attack(secret.ctypes.data, served, for_s=0.3) == IN_PROGRESS
    assert (stranger.mine == CANARY).all()
    stranger.close()
    transport.close()


def test_the_attack_works_on_a_context_with_remote_memory(ucp: Ucp, secret: np.ndarray) -> None:
    context = UcxContext(ucp, TCP, features=MESSAGES | REMOTE_MEMORY)
    served = context.open_worker()
    stranger = Stranger(ucp, served.address())
    assert stranger.attack(secret.ctypes.data, served, for_s=60) == OK
    assert (stranger.mine[:64] == 7).all()
    stranger.close()
    context.close()


def test_workers_that_read_one_sided_listen_nowhere(secret: np.ndarray) -> None:
    source = UcxTransport(Incarnation("s"))
    source.register(secret.ctypes.data, NBYTES)
    mine = np.zeros(NBYTES, dtype=np.uint8)
    reader = UcxTransport(Incarnation("r"))
    reader.register(mine.ctypes.data, NBYTES)
    before = listening_ports()
    reader.connect(Incarnation("s"), source.endpoint())
    assert reader.path(Incarnation("s")).kind == "shared_memory"
    reader.read(Incarnation("s"), [Extent(0, 0, NBYTES)])
    while not reader.poll():
        pass
    assert (mine == secret).all()
    assert listening_ports() <= before
    reader.close()
    source.close()


def test_without_tcp_nothing_listens_and_local_reads_go_on(secret: np.ndarray) -> None:
    before = listening_ports()
    source = UcxTransport(Incarnation("s"), ucx_options={"TLS": "^tcp"})
    source.register(secret.ctypes.data, NBYTES)
    mine = np.zeros(NBYTES, dtype=np.uint8)
    reader = UcxTransport(Incarnation("r"), ucx_options={"TLS": "^tcp"})
    reader.register(mine.ctypes.data, NBYTES)
    reader.connect(Incarnation("s"), source.endpoint())
    assert listening_ports() <= before
    reader.read(Incarnation("s"), [Extent(0, 0, NBYTES)])
    while not reader.poll():
        pass
    assert (mine == secret).all()
    reader.close()
    source.close()


def listening_ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {at.laddr.port for at in connections if at.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(
    ("transports", "want"),
    [
        ("all", "^tcp"),
        ("tcp", None),
        ("tcp,cma,posix", "cma,posix"),
        ("rc, tcp", "rc"),
        ("^ib", "^ib,tcp"),
        ("cma,all", "^tcp"),
    ],
)
def test_tcp_is_taken_out_of_any_choice_of_transports(transports: str, want: str | None) -> None:
    assert without_tcp(transports) == want
