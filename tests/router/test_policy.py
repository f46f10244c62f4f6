"""The least loaded pair, also between two heartbeats, and never the worker that just failed."""

import itertools

import msgspec
import pytest

from core.ids import Incarnation, WorkerId
from core.messages import Heartbeat, Role, WorkerLoad
from router.policy import FailureKind, OwnLoad, Route, choose_route, may_retry, retry_delay_s
from router.registry import Worker


def _worker(worker_id: str, role: Role = "decode", *, suspect: bool = False, **load: int) -> Worker:
    loaded = WorkerLoad(**({"free_blocks": 50, "total_blocks": 100} | load))
    beat = Heartbeat(WorkerId(worker_id), role, Incarnation("i"), "tcp://x", "m", 1000, loaded)
    return Worker(beat, 0.0, proven=True, suspect=suspect)


def _choose(
    num_tokens: int,
    decode: list[Worker],
    prefill: list[Worker],
    own: OwnLoad | None = None,
    avoid: tuple[str, ...] = (),
) -> Route | None:
    return choose_route(
        num_tokens,
        decode=decode,
        prefill=prefill,
        own=own or OwnLoad(),
        local_prefill_max_tokens=64,
        block_size=16,
        avoid=[WorkerId(each) for each in avoid],
    )


def _names(route: Route | None) -> tuple[str, str | None, str]:
    assert route is not None
    prefill = route.prefill
    return route.decode.worker_id, None if prefill is None else prefill.worker_id, route.reason


def test_no_decode_worker_no_route() -> None:
    assert _choose(10, [], [_worker("p", "prefill")]) is None


def test_short_prompts_stay_local_to_the_token() -> None:
    decode, prefill = [_worker("d")], [_worker("p", "prefill")]
    assert _names(_choose(64, decode, prefill)) == ("d", None, "short")
    assert _names(_choose(65, decode, prefill)) == ("d", "p", "long")


def test_without_a_prefill_worker_decode_prefills() -> None:
    assert _names(_choose(500, [_worker("d")], [])) == ("d", None, "no_prefill")


def _of_compat(worker: Worker, compat_hash: str) -> Worker:
    worker.heartbeat = msgspec.structs.replace(worker.heartbeat, compat_hash=compat_hash)
    return worker


def test_a_pair_has_one_compatibility_hash_however_loaded_the_others_are() -> None:
    old, new = _worker("d-old"), _worker("d-new", running=5)
    idle = _of_compat(_worker("p-new", "prefill"), "new")
    busy = _of_compat(_worker("p-old", "prefill", queued_tokens=9000), "old")
    _of_compat(old, "old"), _of_compat(new, "new")
    assert _names(_choose(500, [old], [idle, busy])) == ("d-old", "p-old", "long")
    assert _names(_choose(500, [new], [idle, busy])) == ("d-new", "p-new", "long")
    assert _names(_choose(500, [old], [idle])) == ("d-old", None, "incompatible")
    assert _names(_choose(500, [old], [idle, busy], avoid=("p-old",))) == ("d-old", None, "avoided")


def test_a_worker_that_drains_costs_no_attempt() -> None:
    assert may_retry("draining", attempt=3, max_attempts=3)
    assert retry_delay_s("draining", attempt=3) == 0.0


def test_least_loaded_by_report() -> None:
    decode = [
        _worker("d0", running=3),
        _worker("d1", running=1, waiting=1),
        _worker("d2", running=4),
    ]
    prefill = [_worker("p0", "prefill", queued_tokens=900), _worker("p1", "prefill")]
    assert _names(_choose(100, decode, prefill)) == ("d1", "p1", "long")


def test_burst_between_heartbeats_is_spread() -> None:
    decode = [_worker("d0"), _worker("d1")]
    prefill = [_worker("p0", "prefill"), _worker("p1", "prefill")]
    own = OwnLoad({WorkerId("d0"): 2, WorkerId("d1"): 1}, {WorkerId("p0"): 100})
    assert _names(_choose(100, decode, prefill, own)) == ("d1", "p1", "long")


def test_worker_with_room_goes_before_a_full_one() -> None:
    decode = [_worker("d0", free_blocks=1), _worker("d1", running=9)]
    assert _names(_choose(60, decode, []))[0] == "d1"
    assert _names(_choose(16, decode, []))[0] == "d0"


def test_failed_worker_is_avoided_but_better_than_none() -> None:
    decode = [_worker("d0"), _worker("d1", running=5)]
    assert _names(_choose(10, decode, [], avoid=("d0",)))[0] == "d1"
    assert _names(_choose(10, decode[:1], [], avoid=("d0",)))[0] == "d0"
    prefill = [_worker("p0", "prefill"), _worker("p1", "prefill", queued_tokens=5)]
    assert _names(_choose(100, decode, prefill, avoid=("p0",)))[1] == "p1"
    assert _names(_choose(100, decode, prefill[:1], avoid=("p0",))) == ("d0", None, "avoided")
    suspect = [_worker("p0", "prefill", suspect=True)]
    assert _names(_choose(100, decode, suspect)) == ("d0", None, "avoided")


@pytest.mark.parametrize(
    ("kind", "attempt"), list(itertools.product(["capacity", "transfer", "worker_lost"], [1, 2, 3]))
)
def test_what_another_attempt_can_help_is_retried_up_to_the_limit(
    kind: FailureKind, attempt: int
) -> None:
    assert may_retry(kind, attempt=attempt, max_attempts=3) == (attempt < 3)


@pytest.mark.parametrize("kind", ["request", "internal"])
def test_what_would_fail_again_is_not_retried(kind: FailureKind) -> None:
    assert not may_retry(kind, attempt=1, max_attempts=3)


def test_only_a_full_fleet_is_given_time() -> None:
    assert retry_delay_s("worker_lost", attempt=1) == 0.0
    assert 0 < retry_delay_s("capacity", attempt=1) < retry_delay_s("capacity", attempt=2)
    assert retry_delay_s("capacity", attempt=50) == 2.0
