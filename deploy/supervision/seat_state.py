"""The states of a seat, which is the place of one service under its name. Pure, and total.

Every event that the calls into Ray can bring is decided in every state: in ``TRANSITIONS``,
or in ``IMPOSSIBLE``, which names what only a bug of ours can ask for.

              FOUND                        HEARD_...
    VACANT ──────────> ADOPTED ───────────────┐
      │ START     CREATED   INTRODUCED        v
      └──> NAMELESS ──> PLACED ──> STARTING ──> READY ──> DRAINING
                            └──────────┴─────────┴───────────┴──> ENDED | REFUSED | DEAD

A process that was created is never lost from sight: its seat is given up, or given to a successor,
only after Ray has told its death or in the same transition that kills it.
"""

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from itertools import product

from core.errors import InvalidTransitionError


class SeatState(Enum):
    """Where one service is between its start and the moment when its name is free again."""

    VACANT = auto()
    """There is no such service."""
    NAMELESS = auto()
    """To be created; Ray does not take it as long as its predecessor has its name."""
    PLACED = auto()
    """Ray has taken it; no process has answered, such as for lack of room."""
    ADOPTED = auto()
    """Started by an earlier controller; it may serve, drain or load, and has not told yet."""
    STARTING = auto()
    """Its process answers, and loads."""
    READY = auto()
    DRAINING = auto()
    ENDED = auto()
    """As it was told. Its process is still there."""
    REFUSED = auto()
    """By a config error that no restart mends. Its process is still there."""
    DEAD = auto()
    """Its process is gone."""


class SeatEvent(Enum):
    """What was asked for, found, or heard."""

    START_ASKED = auto()
    DRAIN_ASKED = auto()
    KILL_ASKED = auto()
    FORGET_ASKED = auto()
    FOUND = auto()
    """By its name, when the controller began."""
    MISSED = auto()
    """It was started by an earlier controller, and nothing has its name."""
    CREATED = auto()
    INTRODUCED = auto()
    """Its process has said who it is."""
    HEARD_STARTING = auto()
    HEARD_READY = auto()
    HEARD_DRAINING = auto()
    ENDED = auto()
    REFUSED = auto()
    DIED = auto()


class SeatAction(Enum):
    """What the shell does about it, in the order of the transition."""

    KILL = auto()
    """End the process that the seat has."""
    CREATE = auto()
    """Drop what is known of the last process and have Ray start a new one, as soon as it may."""
    DRAIN = auto()
    TELL_STARTED = auto()
    TELL_ENDED = auto()
    TELL_DIED = auto()


S, E, A = SeatState, SeatEvent, SeatAction
Transition = tuple[SeatState, tuple[SeatAction, ...]]

UP = (S.PLACED, S.ADOPTED, S.STARTING, S.READY, S.DRAINING)
"""Its process is there, or will be as soon as there is room."""
OVER = (S.ENDED, S.REFUSED, S.DEAD)
ANSWERS = (
    *(E.INTRODUCED, E.HEARD_STARTING, E.HEARD_READY, E.HEARD_DRAINING),
    *(E.ENDED, E.REFUSED, E.DIED),
)
"""What only a process can bring about."""


def _every(
    states: Iterable[SeatState], event: SeatEvent, after: SeatState | None, *actions: SeatAction
) -> dict[tuple[SeatState, SeatEvent], Transition]:
    """Return the same transition for all ``states``; without ``after``, each is kept."""
    return {(state, event): (after or state, actions) for state in states}


TRANSITIONS: Mapping[tuple[SeatState, SeatEvent], Transition] = {
    # The seat is taken, and given up.
    (S.VACANT, E.START_ASKED): (S.NAMELESS, (A.CREATE,)),
    (S.VACANT, E.FOUND): (S.ADOPTED, ()),
    (S.VACANT, E.MISSED): (S.DEAD, ()),
    (S.NAMELESS, E.CREATED): (S.PLACED, ()),
    (S.DEAD, E.START_ASKED): (S.NAMELESS, (A.CREATE,)),
    # What has ended keeps its process, and so its name, until it is killed.
    **_every((S.ENDED, S.REFUSED), E.START_ASKED, S.NAMELESS, A.KILL, A.CREATE),
    **_every((S.ENDED, S.REFUSED), E.FORGET_ASKED, S.VACANT, A.KILL),
    (S.DEAD, E.FORGET_ASKED): (S.VACANT, ()),
    # The controller has it end.
    (S.READY, E.DRAIN_ASKED): (S.DRAINING, (A.DRAIN,)),
    (S.NAMELESS, E.KILL_ASKED): (S.DEAD, ()),
    **_every(UP, E.KILL_ASKED, None, A.KILL),
    **_every(OVER, E.KILL_ASKED, None),
    # It answers. A process that drains does not serve again: what says so was sent before.
    (S.PLACED, E.INTRODUCED): (S.STARTING, (A.TELL_STARTED,)),
    **_every((S.ADOPTED, S.STARTING, S.READY, S.DRAINING), E.INTRODUCED, None, A.TELL_STARTED),
    **_every((S.PLACED, S.ADOPTED, S.STARTING, S.READY), E.HEARD_STARTING, S.STARTING),
    **_every((S.PLACED, S.ADOPTED, S.STARTING, S.READY), E.HEARD_READY, S.READY),
    **_every(UP, E.HEARD_DRAINING, S.DRAINING),
    **_every((S.DRAINING,), E.HEARD_STARTING, None),
    **_every((S.DRAINING,), E.HEARD_READY, None),
    # It is over; who is over stays so, whatever is still on its way.
    **_every(UP, E.ENDED, S.ENDED, A.TELL_ENDED),
    **_every(UP, E.REFUSED, S.REFUSED, A.TELL_ENDED),
    **_every(UP, E.DIED, S.DEAD, A.TELL_DIED),
    **_every((S.ENDED, S.REFUSED), E.INTRODUCED, None, A.TELL_STARTED),
    **_every((S.DEAD,), E.INTRODUCED, None),
    **{
        (state, event): (state, ())
        for state, event in product(OVER, ANSWERS)
        if event is not E.INTRODUCED
    },
}

IMPOSSIBLE: frozenset[tuple[SeatState, SeatEvent]] = frozenset(
    {
        # A second process under a name whose first one lives would leave that without a seat.
        *product((S.NAMELESS, *UP), (E.START_ASKED, E.FORGET_ASKED)),
        # Whoever does not serve is killed instead, and whoever has ended needs neither.
        *product((S.NAMELESS, S.PLACED, S.ADOPTED, S.STARTING, *OVER), (E.DRAIN_ASKED,)),
        (S.DRAINING, E.DRAIN_ASKED),
        # Only the first look of a new controller finds and misses.
        *product((S.NAMELESS, *UP, *OVER), (E.FOUND, E.MISSED)),
        *product((S.VACANT, *UP, *OVER), (E.CREATED,)),
        # Nobody is there who could answer or be asked.
        *product((S.VACANT, S.NAMELESS), ANSWERS),
        *product((S.VACANT,), (E.DRAIN_ASKED, E.KILL_ASKED, E.FORGET_ASKED)),
    }
)


def after(state: SeatState, event: SeatEvent) -> Transition:
    """Return the state after ``event``, and what to do on the way.

    Raises:
        InvalidTransitionError: only a bug of ours brings ``event`` in ``state``.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InvalidTransitionError(f"a seat that is {state.name} met {event.name}") from None
