"""What ``sluice status`` says beyond its table.

The failure guarded against: after an update that no worker can start by, a table of old workers
that all are ready.
"""

from core.ids import WorkerId
from core.messages import WorkerLoad
from deploy.api_client import RouterStatus, WorkerState, WorkerStatus
from deploy.commands.status import SILENCE_TOLD_S, progress, shortfall, silence

LOAD = WorkerLoad(running=0, waiting=0, queued_tokens=0, free_blocks=1, total_blocks=1)


def decode(index: int, state: WorkerState = "ready", revision: str = "a") -> WorkerStatus:
    return WorkerStatus(WorkerId(f"decode-{index}"), "decode", state, LOAD, revision=revision)


def test_who_is_wanted_and_not_ready_is_counted_in_one_line() -> None:
    workers = [decode(0), decode(1, "draining"), decode(2, "lost")]
    status = RouterStatus("m", workers, desired={"prefill": 1, "decode": 2})
    line = shortfall(status)
    assert line is not None
    assert line.startswith("ready: 0 of 1 prefill, 1 of 2 decode; ")
    assert "event=stays_down" in line


def test_where_the_reason_is_told_nobody_is_sent_to_the_log() -> None:
    wanted = {"prefill": 0, "decode": 2}
    trouble = ("decode-1 stays down: it died 4 times in a row: ValueError: no",)
    status = RouterStatus("m", [decode(0)], desired=wanted, trouble=trouble)
    assert shortfall(status) == "ready: 1 of 2 decode"


def test_an_update_is_told_until_the_last_worker_of_the_config_before_is_gone() -> None:
    counts, by_b = {"prefill": 0, "decode": 2}, {"prefill": "b", "decode": "b"}

    def told(*workers: WorkerStatus) -> str | None:
        status = RouterStatus("m", list(workers), desired=counts, desired_revisions=by_b)
        return progress(status)

    first = decode(2, "starting", "b")
    assert str(told(decode(0), decode(1), first)).startswith("update under way: 0 of 2 decode ")
    line = told(decode(0), decode(1, "draining"), decode(2, revision="b"))
    assert str(line).startswith("update under way: 1 of 2 decode ")
    assert "sluice update --undo" in str(line)
    new = decode(1, revision="b"), decode(2, revision="b")
    assert "2 of 2 decode" in str(told(decode(0, "draining"), *new))
    assert told(decode(0, "lost"), *new) is None
    assert told(decode(1, revision="b")) is None, "fewer are there; they are of one config"
    assert progress(RouterStatus("m", [decode(0), *new], desired=counts)) is None, "nobody knows"


def test_nothing_is_said_where_as_many_are_ready_as_wanted_or_nobody_knows() -> None:
    wanted = {"prefill": 0, "decode": 1}
    assert shortfall(RouterStatus("m", [decode(0), decode(1)], desired=wanted)) is None
    assert shortfall(RouterStatus("m", [decode(0)])) is None


def test_a_controller_that_is_silent_is_told_of_and_one_that_was_away_for_a_moment_is_not() -> None:
    for known in (None, 0.0, SILENCE_TOLD_S / 2):
        assert silence(RouterStatus("m", [decode(0)], controller_silence_s=known)) is None
    line = silence(RouterStatus("m", [decode(0)], controller_silence_s=40.2))
    assert line is not None
    assert "the controller has been silent for 40 s" in line
