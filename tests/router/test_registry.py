"""A dead or replaced worker must get no request, and a late heartbeat must not revive one."""

from collections.abc import Iterator

import msgspec
import pytest

from core.ids import Incarnation, WorkerId
from core.messages import DesiredWorkers, Heartbeat, Role, WorkerLoad
from router.registry import Change, WorkerRegistry

D0 = WorkerId("decode-0")


@pytest.fixture
def registry() -> Iterator[WorkerRegistry]:
    """Workers are gone after 4 s of silence."""
    registry = WorkerRegistry(silence_s=4.0)
    yield registry
    registry.check_invariants()


def _beat(
    life: str = "a", *, worker: WorkerId = D0, role: Role = "decode", state: str = "ready"
) -> Heartbeat:
    return Heartbeat(
        worker,
        role,
        Incarnation(life),
        "tcp://x",
        "m",
        100,
        WorkerLoad(),
        state=state,  # type: ignore[arg-type]
    )


def test_decode_worker_is_usable_once_proven_and_prefill_worker_at_once(
    registry: WorkerRegistry,
) -> None:
    assert registry.observe(_beat(), now_s=0.0) is Change.APPEARED
    registry.observe(_beat(worker=WorkerId("p"), role="prefill"), now_s=0.0)
    assert registry.usable("decode") == []
    assert len(registry.usable("prefill")) == 1
    registry.prove(D0, Incarnation("another"))
    assert registry.usable("decode") == []
    registry.prove(D0, Incarnation("a"))
    assert [worker.worker_id for worker in registry.usable("decode")] == [D0]


def test_draining_worker_gets_nothing_new(registry: WorkerRegistry) -> None:
    registry.observe(_beat(), now_s=0.0)
    registry.prove(D0, Incarnation("a"))
    registry.observe(_beat(state="draining"), now_s=1.0)
    assert registry.usable("decode") == []
    registry.observe(_beat(), now_s=2.0)
    assert len(registry.usable("decode")) == 1


def test_silent_worker_is_gone_at_its_bound_and_not_before(registry: WorkerRegistry) -> None:
    registry.observe(_beat(), now_s=10.0)
    assert registry.next_expiry_s() == 14.0
    assert registry.expire(now_s=13.9) == []
    assert [worker.worker_id for worker in registry.expire(now_s=14.0)] == [D0]
    assert registry.get(D0) is None
    assert registry.next_expiry_s() is None
    assert registry.observe(_beat(), now_s=15.0) is Change.APPEARED


def test_d15_restarted_worker_replaces_its_old_life_for_good(registry: WorkerRegistry) -> None:
    registry.observe(_beat("a"), now_s=0.0)
    registry.prove(D0, Incarnation("a"))
    assert registry.observe(_beat("b"), now_s=1.0) is Change.RESTARTED
    assert registry.usable("decode") == []
    assert registry.observe(_beat("a"), now_s=2.0) is Change.NONE
    worker = registry.get(D0)
    assert worker is not None
    assert worker.incarnation == "b"
    assert not registry.lose(D0, Incarnation("a"))
    assert registry.lose(D0, Incarnation("b"))


def test_suspect_worker_is_cleared_by_its_next_heartbeat(registry: WorkerRegistry) -> None:
    registry.observe(_beat(), now_s=0.0)
    registry.suspect(D0)
    registry.suspect(WorkerId("unknown"))
    worker = registry.get(D0)
    assert worker is not None
    assert worker.suspect
    registry.observe(_beat(), now_s=1.0)
    assert not worker.suspect


def test_a_lost_worker_is_shown_for_a_while_and_one_that_drained_is_not(
    registry: WorkerRegistry,
) -> None:
    registry.observe(_beat(), now_s=10.0)
    registry.expire(now_s=14.0)
    (lost,) = registry.lost(now_s=20.0)
    assert (lost.worker_id, lost.last_seen_s) == (D0, 10.0)
    assert registry.lost(now_s=310.0) == []

    registry.observe(_beat(), now_s=400.0)
    registry.lose(D0, _beat().incarnation)
    assert registry.lost(now_s=401.0)
    registry.observe(_beat(), now_s=402.0)
    assert registry.lost(now_s=402.0) == [], "it is back"
    registry.drain(D0, _beat().incarnation)
    assert registry.usable("decode") == []
    registry.lose(D0, _beat().incarnation)
    assert registry.lost(now_s=403.0) == []


def _told(worker: str, generation: int, num_decode: int) -> Heartbeat:
    desired = DesiredWorkers(generation, prefill=1, decode=num_decode)
    return msgspec.structs.replace(_beat(worker=WorkerId(worker)), desired=desired)


def test_of_what_is_wanted_the_newest_word_counts_in_whatever_order_it_comes(
    registry: WorkerRegistry,
) -> None:
    assert registry.desired(None) is None
    registry.observe(_beat(worker=WorkerId("new")), now_s=0.0)  # not told yet
    assert registry.desired(None) is None
    registry.observe(_told("a", 2, num_decode=3), now_s=0.0)
    registry.observe(_told("b", 1, num_decode=2), now_s=0.1)
    assert registry.desired(None) == DesiredWorkers(2, prefill=1, decode=3)


def test_of_two_words_of_one_generation_the_later_edition_counts(registry: WorkerRegistry) -> None:
    for worker, edition, trouble in (("a", 7, ()), ("b", 9, ("c stays down",)), ("d", 8, ("c",))):
        word = DesiredWorkers(1, prefill=0, decode=2, edition=edition, trouble=trouble)
        beat = msgspec.structs.replace(_beat(worker=WorkerId(worker)), desired=word)
        registry.observe(beat, now_s=0.0)
    desired = registry.desired(None)
    assert desired is not None
    assert desired.trouble == ("c stays down",)


def test_a_router_that_the_controller_has_told_knows_what_is_wanted_without_any_worker() -> None:
    word = DesiredWorkers(1, prefill=0, decode=1, trouble=("decode-0 stays down: no room",))
    registry = WorkerRegistry(silence_s=3.0)
    assert registry.desired(word) == word
    registry.observe(_told("a", 2, num_decode=3), now_s=0.0)
    assert registry.desired(word) == DesiredWorkers(2, prefill=1, decode=3)


def test_what_a_deployment_wanted_that_is_gone_does_not_outdo_its_successor(
    registry: WorkerRegistry,
) -> None:
    """Routers of their own outlive a deployment; the next one counts its changes from 0 again."""
    registry.observe(_told("a", 7, num_decode=3), now_s=0.0)
    registry.observe(_told("b", 0, num_decode=1), now_s=4.0)
    registry.expire(now_s=4.0)
    assert registry.desired(None) == DesiredWorkers(0, prefill=1, decode=1)


def _silent(worker: str, silence_s: float | None) -> Heartbeat:
    beat = _beat(worker=WorkerId(worker))
    return msgspec.structs.replace(beat, controller_silence_s=silence_s)


def test_a_controller_is_as_silent_as_the_worker_that_heard_it_last_says(
    registry: WorkerRegistry,
) -> None:
    registry.observe(_silent("a", None), now_s=0.0)
    assert registry.controller_silence_s(now_s=1.0, here_s=None) is None, (
        "nobody supervises that one"
    )
    registry.observe(_silent("b", 40.0), now_s=0.0)
    assert registry.controller_silence_s(now_s=0.0, here_s=None) == 40.0
    assert registry.controller_silence_s(now_s=2.0, here_s=None) == 42.0, "since it reported"
    registry.observe(_silent("c", 0.5), now_s=2.0)  # the controller is cut off from b alone
    assert registry.controller_silence_s(now_s=2.0, here_s=None) == 0.5


def test_what_the_controller_told_the_router_counts_too_and_is_all_where_no_worker_lives() -> None:
    registry = WorkerRegistry(silence_s=3.0)
    assert registry.controller_silence_s(now_s=0.0, here_s=7.0) == 7.0
    registry.observe(_silent("a", 40.0), now_s=0.0)
    assert registry.controller_silence_s(now_s=0.0, here_s=7.0) == 7.0
