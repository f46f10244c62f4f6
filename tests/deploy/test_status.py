"""What ``sluice status`` says beyond its table.

The failure guarded against: after an update that no worker can start by, a table of old workers
that all are ready.
"""

from core.ids import WorkerId
from core.messages import WorkerLoad
from deploy.api_client import RouterStatus, WorkerState, WorkerStatus
from deploy.commands.status import shortfall

LOAD = WorkerLoad(running=0, waiting=0, queued_tokens=0, free_blocks=1, total_blocks=1)


def decode(index: int, state: WorkerState = "ready") -> WorkerStatus:
    return WorkerStatus(WorkerId(f"decode-{index}"), "decode", state, LOAD)


def test_who_is_wanted_and_not_ready_is_counted_in_one_line() -> None:
    workers = [decode(0), decode(1, "draining"), decode(2, "lost")]
    status = RouterStatus("m", workers, desired={"prefill": 1, "decode": 2})
    line = shortfall(status)
    assert line is not None
    assert line.startswith("ready: 0 of 1 prefill, 1 of 2 decode; ")
    assert "event=stays_down" in line


def test_nothing_is_said_where_as_many_are_ready_as_wanted_or_nobody_knows() -> None:
    wanted = {"prefill": 0, "decode": 1}
    assert shortfall(RouterStatus("m", [decode(0), decode(1)], desired=wanted)) is None
    assert shortfall(RouterStatus("m", [decode(0)])) is None
