"""What ``sluice status`` says beyond its table.

The failure guarded against: after an update that no worker can start by, a table of old workers
that all are ready.
"""

import msgspec
import pytest

from core.ids import WorkerId
from core.messages import WorkerLoad
from deploy.api_client import ApiClient, RouterStatus, WorkerState, WorkerStatus
from deploy.commands.status import SILENCE_TOLD_S, progress, run_status, shortfall, silence

LOAD = WorkerLoad(running=0, waiting=0, queued_tokens=0, free_blocks=1, total_blocks=1)


def decode(index: int, state: WorkerState = "ready", revision: str = "a") -> WorkerStatus:
    return WorkerStatus(WorkerId(f"decode-{index}"), "decode", state, LOAD, revision=revision)


def test_who_is_wanted_and_not_ready_is_counted_in_one_line() -> None:
    workers = [decode(0), decode(1, "draining"), decode(2, "lost")]
    status = RouterStatus("m", workers, desired={"prefill": 1, "decode": 2})
    line = "0 of 1 prefill, 1 of 2 decode ready"
    told = f"{line}; the rest is starting, and what keeps one from it is told here"
    assert shortfall(status) == told
    assert shortfall(msgspec.structs.replace(status, controller_silence_s=1.0)) == told
    alone = msgspec.structs.replace(status, controller_silence_s=SILENCE_TOLD_S)
    assert shortfall(alone) == line, "nobody starts them"


def test_where_a_reason_is_told_not_all_of_the_rest_is_said_to_be_starting() -> None:
    wanted = {"prefill": 0, "decode": 2}
    trouble = ("decode-1 stays down: it died 4 times in a row: ValueError: no",)
    status = RouterStatus("m", [decode(0)], desired=wanted, trouble=trouble)
    assert shortfall(status) == "1 of 2 decode ready"


def test_an_update_is_told_until_the_last_worker_of_the_config_before_is_gone() -> None:
    counts, by_b = {"prefill": 0, "decode": 2}, {"prefill": "b", "decode": "b"}

    def told(*workers: WorkerStatus) -> str | None:
        status = RouterStatus("m", list(workers), desired=counts, desired_revisions=by_b)
        return progress(status)

    first = decode(2, "starting", "b")
    assert str(told(decode(0), decode(1), first)).startswith("update under way: 0 of 2 decode ")
    line = told(decode(0), decode(1, "draining"), decode(2, revision="b"))
    assert str(line).startswith("update under way: 1 of 2 decode ")
    assert "`sluice update --undo` (with its --name) goes back" in str(line)
    new = decode(1, revision="b"), decode(2, revision="b")
    assert "2 of 2 decode" in str(told(decode(0, "draining"), *new))
    assert told(decode(0, "lost"), *new) is None
    assert told(decode(1, revision="b")) is None, "fewer are there; they are of one config"
    assert progress(RouterStatus("m", [decode(0), *new], desired=counts)) is None, "nobody knows"


@pytest.mark.parametrize(
    ("workers", "trouble", "word"),
    [
        ([decode(0), decode(1)], (), "under way"),
        ([decode(0), decode(1)], ("decode-2 stays down: no",), "is stuck"),
        ([decode(0), decode(1)], ("decode-2 refuses to start: no",), "is stuck"),
        ([decode(0)], ("decode-1 stays down: no",), "is stuck"),
        ([decode(0), decode(1, "lost")], ("decode-1 stays down: no",), "is stuck"),
        ([decode(0), decode(1)], ("decode-2 died and is started anew: no",), "under way"),
        ([decode(0), decode(1)], ("decode-2 waits for room in the cluster",), "under way"),
        ([decode(0), decode(1)], ("prefill-1 stays down: no",), "under way"),
        ([decode(0), decode(1, "draining")], ("decode-2 stays down: no",), "under way"),
        ([decode(0), decode(2, "starting", "b")], ("decode-1 stays down: no",), "under way"),
    ],
)
def test_an_update_is_stuck_when_all_that_is_missing_stays_down(
    workers: list[WorkerStatus], trouble: tuple[str, ...], word: str
) -> None:
    counts, by_b = {"decode": 2}, {"decode": "b"}
    status = RouterStatus("m", workers, desired=counts, desired_revisions=by_b, trouble=trouble)
    assert str(progress(status)).startswith(f"update {word}: 0 of 2 decode ")
    more = msgspec.structs.replace(status, desired={"decode": 9})
    assert str(progress(more)).startswith("update under way: "), "others start, too"


def test_an_update_goes_on_while_one_role_s_does() -> None:
    prefill = WorkerStatus(WorkerId("prefill-0"), "prefill", "ready", LOAD, revision="a")
    status = RouterStatus(
        "m",
        [prefill, decode(0)],
        desired={"prefill": 1, "decode": 1},
        desired_revisions={"prefill": "b", "decode": "b"},
        trouble=("decode-1 stays down: no",),
    )
    assert str(progress(status)).startswith("update under way: 0 of 1 prefill, 0 of 1 decode ")


def test_nothing_is_known_any_more_of_a_worker_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_metrics(worker: WorkerStatus, address: str) -> WorkerStatus:
        return msgspec.structs.replace(worker, metrics_address=address)

    workers = [with_metrics(decode(0), "http://up"), with_metrics(decode(1, "lost"), "http://gone")]
    monkeypatch.setattr(ApiClient, "status", lambda _: RouterStatus("m", workers))
    monkeypatch.setattr(ApiClient, "json", lambda *_: {"data": [{"id": "m"}]})
    monkeypatch.setattr(ApiClient, "is_ready", lambda _: True)
    assert run_status("http://127.0.0.1:1") == 0
    said = capsys.readouterr().out
    assert "http://up" in said
    assert "http://gone" not in said
    (row,) = (line for line in said.splitlines() if "decode-1" in line)
    assert row.count(" - ") == 4, row


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
