"""When a UCX worker may be waited for: a wake-up that is lost leaves a read hanging for seconds.

UCX holds some work back until the next progress and tells nobody. A source that waited right after
it had answered a new reader was seen to sleep until a keepalive, 17 seconds later, once in some
hundred connections.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from core.ids import Incarnation
from transfer.transport import Extent
from transfer.ucx_bindings import FAIL_PEER, MESSAGES, Ucp
from transfer.ucx_library import load_ucx
from transfer.ucx_transport import UcxTransport
from transfer.ucx_worker import UcxContext

pytestmark = [pytest.mark.ucx]


@pytest.fixture
def context() -> Iterator[UcxContext]:
    context = UcxContext(Ucp(load_ucx()), {"TLS": "tcp"}, features=MESSAGES)
    yield context
    context.close()


def test_a_worker_is_waited_for_only_after_a_progress_that_found_nothing(
    context: UcxContext,
) -> None:
    worker, other = context.open_worker(), context.open_worker()
    assert not worker.arm()
    assert worker.needs_progress
    worker.progress(limit_s=60)
    assert worker.arm()
    assert worker.arm(), "nothing has happened since"
    endpoint = worker.connect(other.address(), FAIL_PEER)
    assert not worker.arm()
    worker.progress(limit_s=60)
    worker.touch()
    assert not worker.arm()
    worker.disconnect(endpoint)
    assert worker.needs_progress


class _BusyUcp(Ucp):
    """UCX with a device that always has something left to do."""

    def long(self, name: str) -> Any:
        function = super().long(name)

        def progress(worker: int) -> int:
            return function(worker) or 1

        return progress if name == "ucp_worker_progress" else function


def test_a_progress_that_ran_out_of_time_has_to_go_on() -> None:
    context = UcxContext(_BusyUcp(load_ucx()), {"TLS": "tcp"}, features=MESSAGES)
    worker = context.open_worker()
    assert worker.progress(limit_s=0)
    assert worker.needs_progress
    assert not worker.arm()
    context.close()


@pytest.mark.parametrize("options", [{}, {"TLS": "tcp"}], ids=["shared_memory", "tcp"])
def test_after_a_post_the_transport_asks_to_be_polled(options: dict[str, str]) -> None:
    pool = np.zeros(4096, dtype=np.uint8)
    transport = UcxTransport(Incarnation("x"), ucx_options=options)
    transport.register(pool.ctypes.data, pool.nbytes)
    source = UcxTransport(Incarnation("s"), ucx_options=options)
    source.register(pool.ctypes.data, pool.nbytes)
    transport.connect(Incarnation("s"), source.endpoint())
    for step in ("connected", "posted"):
        if step == "posted":
            transport.read(Incarnation("s"), [Extent(0, 0, 64)])
        assert not transport.arm(), step
        for _ in range(10_000):
            transport.progress()
            transport.poll()
            source.progress()
            if transport.arm():
                break
        else:
            pytest.fail(f"polling does not come to an end once {step}")
    transport.close()
    source.close()
