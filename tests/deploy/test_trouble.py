"""What an operator is told of services that do not serve: the last reason, and no old story.

The failures guarded against: a worker of an update that stays down with the reason in a log alone;
a line about one that serves by now, or about another that had the name before; a planned end that
is told as a trouble; and a number of deaths that is not the one by which a worker is given up.
"""

from collections.abc import Mapping

import msgspec
import pytest

from core.messages import DesiredWorkers
from core.messages.serving import MAX_TROUBLES
from deploy.supervision.desired import Kill, Observed, Start, State
from deploy.supervision.events import (
    GaveUp,
    ProcessDied,
    ProcessIdentity,
    ProcessStarted,
    ServiceEnded,
)
from deploy.supervision.trouble import ROOM_WAIT_S, Troubles

NOW = 1_800_000_000.0


def seen(**states: State) -> Mapping[str, Observed]:
    names = {key: key.replace("_", "-") for key in states}
    return {names[key]: Observed(names[key], "decode", "a", state) for key, state in states.items()}


def lines(troubles: Troubles) -> tuple[str, ...]:
    return troubles.told(NOW)[1]


def die(troubles: Troubles, name: str, reason: str, deaths: int = 1) -> None:
    """Have one die, and be started anew after ``deaths`` in a row."""
    troubles.hear(ProcessDied(name, reason))
    troubles.start(Start(name, "decode", "a", deaths))


@pytest.fixture
def troubles() -> Troubles:
    return Troubles(NOW)


def test_who_died_too_often_stays_down_with_the_last_reason_until_it_serves(
    troubles: Troubles,
) -> None:
    die(troubles, "decode-1", "ValueError: first")
    die(troubles, "decode-1", "ValueError: last", deaths=2)
    assert lines(troubles) == (
        "decode-1 died 2 times in a row and is started anew: ValueError: last",
    )
    told = troubles.hear(GaveUp("decode-1", "it died 5 times in a row"))
    assert told == GaveUp("decode-1", "it died 5 times in a row: ValueError: last")
    line = "decode-1 stays down: it died 5 times in a row: ValueError: last"
    for state in ("dead", "pending", "starting"):
        troubles.see(NOW, seen(decode_1=state))
        assert lines(troubles) == (line,)
    troubles.see(NOW, seen(decode_1="ready"))
    assert lines(troubles) == ()
    die(troubles, "decode-1", "SIGSEGV", deaths=3)
    assert lines(troubles) == ("decode-1 died 3 times in a row and is started anew: SIGSEGV",), (
        "it did not serve for long"
    )


def test_who_died_is_told_of_when_it_is_started_anew_and_not_while_that_is_undecided(
    troubles: Troubles,
) -> None:
    troubles.hear(ProcessDied("decode-1", "SIGSEGV"))
    troubles.see(NOW, seen(decode_1="dead"))
    assert lines(troubles) == ()
    troubles.start(Start("decode-1", "decode", "a", deaths=1))
    assert lines(troubles) == ("decode-1 died and is started anew: SIGSEGV",)


def test_a_death_that_only_the_next_controller_has_seen_is_told_without_a_reason(
    troubles: Troubles,
) -> None:
    troubles.see(NOW, seen(decode_1="dead"))
    troubles.start(Start("decode-1", "decode", "a", deaths=1))
    assert lines(troubles) == ("decode-1 died and is started anew",)


def test_what_a_config_refused_is_not_told_of_one_that_starts_by_another(
    troubles: Troubles,
) -> None:
    troubles.hear(ServiceEnded("decode-1", "cache.num_blocks: none fits"))
    troubles.start(Start("decode-1", "decode", "b"))
    assert lines(troubles) == ()
    assert troubles.hear(GaveUp("decode-1", "x")) == GaveUp("decode-1", "x")


def test_whom_its_config_refuses_stays_down_with_what_is_wrong_with_it(troubles: Troubles) -> None:
    troubles.hear(ServiceEnded("decode-1", "cache.num_blocks: none fits"))
    assert lines(troubles) == ("decode-1 refuses to start: cache.num_blocks: none fits",)
    troubles.hear(GaveUp("decode-1", "its config cannot work"))
    assert lines(troubles) == (
        "decode-1 stays down: its config cannot work: cache.num_blocks: none fits",
    )


def test_the_reason_of_an_ordered_death_is_why_it_was_ordered(troubles: Troubles) -> None:
    troubles.order(Kill("decode-1", "not ready after 300 s"))
    assert troubles.is_ordered("decode-1")
    troubles.see(NOW, seen(decode_1="starting"))
    die(troubles, "decode-1", "killed by ray.kill")
    assert lines(troubles) == ("decode-1 died and is started anew: not ready after 300 s",)
    assert not troubles.is_ordered("decode-1")


@pytest.mark.parametrize("news", ["ended", "started"])
def test_an_order_that_met_no_life_explains_no_later_death(news: str, troubles: Troubles) -> None:
    troubles.order(Kill("decode-1", "no progress for 60 s"))
    identity = ProcessIdentity(1, "here", "decode-1", "decode", "a")
    ended = ServiceEnded("decode-1", None)
    troubles.hear(ended if news == "ended" else ProcessStarted("decode-1", identity))
    die(troubles, "decode-1", "SIGSEGV")
    assert lines(troubles) == ("decode-1 died and is started anew: SIGSEGV",)


def test_the_end_of_whom_was_sent_away_is_no_trouble(troubles: Troubles) -> None:
    troubles.see(NOW, seen(decode_0="draining", decode_1="pending"))
    troubles.order(Kill("decode-0", "not drained after 60 s"))
    troubles.order(Kill("decode-1", "any words", is_unwanted=True))
    for name in ("decode-0", "decode-1"):
        die(troubles, name, "killed")
    troubles.see(NOW + 2 * ROOM_WAIT_S, seen(decode_0="dead", decode_1="pending"))
    assert lines(troubles) == ()


def test_the_end_of_whom_was_sent_away_while_it_started_is_no_news(troubles: Troubles) -> None:
    troubles.order(Kill("decode-1", "not wanted any more", is_unwanted=True))
    troubles.hear(ProcessStarted("decode-1", ProcessIdentity(1, "here", "decode-1", "decode", "a")))
    assert troubles.is_ordered("decode-1")


def test_nothing_is_told_of_one_that_had_the_name_before(troubles: Troubles) -> None:
    die(troubles, "decode-1", "old")
    die(troubles, "decode-2", "old")
    troubles.order(Kill("decode-1", "any words", is_unwanted=True))
    troubles.forget("decode-1")
    troubles.see(NOW, seen(decode_1="pending"))
    assert lines(troubles) == ()
    told = troubles.hear(GaveUp("decode-1", "its config cannot work"))
    assert told == GaveUp("decode-1", "its config cannot work")
    troubles.see(NOW, seen(decode_2="dead"))
    assert troubles.hear(GaveUp("decode-2", "x")) == GaveUp("decode-2", "x"), "it was away"


def test_who_waits_for_room_for_long_is_told_of_until_it_has_some(troubles: Troubles) -> None:
    troubles.see(NOW, seen(decode_1="pending"))
    troubles.see(NOW + ROOM_WAIT_S - 1, seen(decode_1="pending"))
    assert lines(troubles) == ()
    troubles.see(NOW + ROOM_WAIT_S, seen(decode_1="pending"))
    assert lines(troubles) == ("decode-1 waits for room in the cluster",)
    troubles.see(NOW + ROOM_WAIT_S + 1, seen(decode_1="starting"))
    assert lines(troubles) == ()
    troubles.see(NOW + 2 * ROOM_WAIT_S, seen(decode_1="pending"))
    assert lines(troubles) == (), "it waits anew"


def test_who_waits_for_room_is_told_in_one_line_after_what_is_wrong(troubles: Troubles) -> None:
    """Else the forty that a slip of a finger asked for would hide the one that cannot start."""
    pending: dict[str, State] = {f"decode_{index}": "pending" for index in range(20, 60)}
    for now in (NOW, NOW + ROOM_WAIT_S):
        troubles.see(now, seen(**pending, decode_1="dead"))
    troubles.hear(ServiceEnded("decode-1", "no"))
    assert lines(troubles) == (
        "decode-1 refuses to start: no",
        "decode-20, decode-21, decode-22 and 37 more wait for room in the cluster",
    )


def test_every_change_is_a_higher_edition_and_a_later_controller_s_is_higher_still(
    troubles: Troubles,
) -> None:
    first, _ = troubles.told(NOW)
    editions = [first]
    for index in range(5):
        die(troubles, "decode-1", str(index))
        editions.append(troubles.told(NOW)[0])
        assert troubles.told(NOW + 1000)[0] == editions[-1], "nothing has changed"
    assert editions == sorted(set(editions))
    assert Troubles(NOW + 60).told(NOW + 60)[0] > editions[-1]


def test_the_newest_few_are_told_each_in_one_line_that_a_router_takes(troubles: Troubles) -> None:
    dead: dict[str, State] = {f"decode_{index}": "dead" for index in range(99)}
    troubles.see(NOW, seen(**dead))
    for index in range(99):
        reason = f"it is \x1b[2J [/bold] \udcff\r\n {'long ' * 1000}"
        troubles.hear(ProcessDied(f"decode-{index}", reason))
        troubles.hear(GaveUp(f"decode-{index}", "it died 4 times in a row"))
    told = lines(troubles)
    *shown, rest = told
    assert [line.split()[0] for line in shown] == [
        f"decode-{98 - index}" for index in range(MAX_TROUBLES - 1)
    ]
    assert rest == f"and {99 - (MAX_TROUBLES - 1)} more; see the controller's log"
    assert all(line.isprintable() for line in told)
    word = DesiredWorkers(1, 1, 1, trouble=told)
    encoded = msgspec.msgpack.encode(word)
    assert msgspec.msgpack.decode(encoded, type=DesiredWorkers) == word
