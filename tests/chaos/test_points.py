"""Each fault at each point of a request's way, between real processes and over real links.

Whatever is struck, and whenever: the client has the right answer, no other request fails, those
whose workers are well are served at their first attempt, every block of every worker comes back
within the bound that the configuration gives, and the pair that was struck works again without a
restart of the one that was not. Poison is on: whoever meets a block that was written while it was
free ends, and is missed.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from tests.chaos.faults import FAULTS, POINTS, Fault
from tests.chaos.fleet import CHANNEL_SILENCE_S, WORKERS, Bystanders, Fleet, Texts, Victim
from tests.chaos.network import why_not
from tests.integration.models import tiny_model

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(400)]

Point = Callable[[Fleet, list[int]], AbstractContextManager[Victim]]

QUICK = {
    ("cut-prefill", "half_landed"),
    ("freeze-prefill", "posted"),
    ("part-the-pair", "landed_not_released"),
}
"""The cells that every run plays."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def fleet(model_path: Path) -> Iterator[Fleet]:
    if (reason := why_not()) is not None:
        pytest.skip(f"no network namespaces with shaped links: {reason}")
    with Fleet.open(model_path, Texts.of(model_path)) as fleet:
        yield fleet


def cell(fault: Fault, point: Point) -> object:
    name = point.__name__
    marks = [] if (fault.name, name) in QUICK else [pytest.mark.slow]
    return pytest.param(fault, point, id=f"{fault.name}-{name}", marks=marks)


@pytest.mark.parametrize(
    ("fault", "point"), [cell(fault, point) for fault in FAULTS for point in POINTS]
)
def test_i10_c20_every_block_comes_back_and_nobody_is_told_anything_wrong(
    fleet: Fleet, fault: Fault, point: Point
) -> None:
    fleet.wait_home()
    lives = fleet.lives()
    prompt = fleet.texts.victims[0]

    # Given a request at some point of its way, and others all the time
    with Bystanders(fleet) as bystanders:
        with point(fleet, prompt) as victim:
            # When the fault strikes
            fault.strike(fleet, victim)
        answer = victim.answer.result()
    # Then the client has the right answer, and blocks come back though nothing is mended
    assert fleet.is_right(prompt, answer), answer.text
    fleet.wait_idle(set(WORKERS) - {fault.struck(victim)})
    with bystanders:
        fault.mend(fleet, victim)
        fleet.stack.wait_ready()
    for _, asked, response in bystanders.answers:
        assert fleet.is_right(asked, response), response.text
    # Requests whose workers are well did not notice
    assert num_untouched(fleet, fault, victim, bystanders) > 0
    # And the pair works again, the one that was not struck in the life that it had
    fleet.wait_home()
    fleet.wait_pair(victim.prefill, victim.decode)
    fleet.wait_home()
    now = fleet.lives()
    changed = {worker for worker in WORKERS if lives[worker] != now[worker]}
    assert changed == ({fault.struck(victim)} if fault.is_fatal else set())


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.__name__)
def test_h02_a_killed_router_leaves_nothing_behind(fleet: Fleet, point: Point) -> None:
    fleet.wait_home()
    lives = fleet.lives()
    prompt = fleet.texts.victims[0]
    # Given a request at some point of its way
    with point(fleet, prompt) as victim:
        # When the router is killed, and started again
        fleet.stack.kill("router")
    fleet.stack.start("router")
    # Then the client knows: it has the right answer of a moment before, or a broken connection
    try:
        answer = victim.answer.result()
    except httpx.TransportError:
        pass
    else:
        assert fleet.is_right(prompt, answer), answer.text
    # And no worker keeps a block for it, and the pair works, all in the lives that they had
    fleet.wait_home()
    fleet.wait_pair(victim.prefill, victim.decode)
    assert fleet.lives() == lives


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.__name__)
def test_h02_a_router_that_was_frozen_answers_or_says_so(fleet: Fleet, point: Point) -> None:
    fleet.wait_home()
    lives = fleet.lives()
    prompt = fleet.texts.victims[0]
    # Given a request at some point of its way
    with point(fleet, prompt) as victim:
        # When the router stands still until workers have given it up
        fleet.stack.kill("router", signal_number=signal.SIGSTOP)
    time.sleep(CHANNEL_SILENCE_S + 1)
    fleet.stack.kill("router", signal_number=signal.SIGCONT)
    # Then the client has the right answer, or is told that it will get none
    answer = victim.answer.result()
    assert fleet.is_right(prompt, answer) or answer.status_code == 503, answer.text
    fleet.wait_home()
    fleet.wait_pair(victim.prefill, victim.decode)
    assert fleet.lives() == lives


def num_untouched(fleet: Fleet, fault: Fault, victim: Victim, bystanders: Bystanders) -> int:
    """Return how many requests the fault did not concern, each of them served at once."""
    count = 0
    for name, _, _ in bystanders.answers:
        events = fleet.trace(name)
        routes = [e["values"] for e in events["router"] if e["event"] == "dispatched"]
        prefill, decode = routes[0].get("prefill", ""), routes[0]["decode"]
        if fault.touches(victim, prefill, decode) or not prefill:
            continue
        assert len(routes) == 1, (name, routes)
        assert "recomputing" not in [e["event"] for e in events[decode]], (name, events)
        count += 1
    return count
