"""The reader's two state machines, as tables.

A request:

    RECEIVING ──complete, lease proven────────────────────────> GONE  deliver, release
        │  ^                                                     ^
        │  └─rolled back─┐                                       │
        └─complete, not proven─> CONFIRMING ──complete, proven───┘
    either ──failed──> GONE  fail, withdraw
    either ──cancelled──> GONE  withdraw
    either ──source lost──> GONE  fail

A piece of it:

    ANNOUNCED ──allocated──> READING ──completed──> LANDED
        ^                       │                     │
        └──────rolled back──────┴─────────────────────┘

A read that goes on after its piece was rolled back, or after its request is GONE, is not a state
here: it is an operation of nobody, and ends in quarantine.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from core.errors import InvalidTransitionError


class State(Enum):
    """Where a request is."""

    RECEIVING = auto()
    """Tickets, memory or reads are missing."""
    CONFIRMING = auto()
    """Every piece has landed; the source must confirm that it held the blocks all the time."""
    GONE = auto()
    """Ended. Its entry does not exist any more."""


class Event(Enum):
    """What happened to a request."""

    COMPLETE_PROVEN = auto()
    COMPLETE_UNPROVEN = auto()
    ROLLED_BACK = auto()
    CANCELLED = auto()
    FAILED = auto()
    SOURCE_LOST = auto()


class Effect(Enum):
    """What must be done because of it, in order."""

    DELIVER = auto()
    RELEASE = auto()
    CONFIRM = auto()
    FAIL = auto()
    WITHDRAW = auto()


_DELIVER = (State.GONE, (Effect.DELIVER, Effect.RELEASE))
_FAIL = (State.GONE, (Effect.FAIL, Effect.WITHDRAW))

TRANSITIONS: Final[Mapping[tuple[State, Event], tuple[State, tuple[Effect, ...]]]] = {
    (State.RECEIVING, Event.COMPLETE_PROVEN): _DELIVER,
    (State.RECEIVING, Event.COMPLETE_UNPROVEN): (State.CONFIRMING, (Effect.CONFIRM,)),
    (State.RECEIVING, Event.ROLLED_BACK): (State.RECEIVING, ()),
    (State.RECEIVING, Event.CANCELLED): (State.GONE, (Effect.WITHDRAW,)),
    (State.RECEIVING, Event.FAILED): _FAIL,
    (State.RECEIVING, Event.SOURCE_LOST): (State.GONE, (Effect.FAIL,)),
    (State.CONFIRMING, Event.COMPLETE_PROVEN): _DELIVER,
    (State.CONFIRMING, Event.COMPLETE_UNPROVEN): (State.CONFIRMING, ()),
    (State.CONFIRMING, Event.ROLLED_BACK): (State.RECEIVING, ()),
    (State.CONFIRMING, Event.CANCELLED): (State.GONE, (Effect.WITHDRAW,)),
    (State.CONFIRMING, Event.FAILED): _FAIL,
    (State.CONFIRMING, Event.SOURCE_LOST): (State.GONE, (Effect.FAIL,)),
}


class PieceState(Enum):
    """Where a piece is."""

    ANNOUNCED = auto()
    """Its ticket is here, its memory is not."""
    READING = auto()
    LANDED = auto()


class PieceEvent(Enum):
    """What happened to a piece."""

    ALLOCATED = auto()
    COMPLETED = auto()
    ROLLED_BACK = auto()


PIECE_TRANSITIONS: Final[Mapping[tuple[PieceState, PieceEvent], PieceState]] = {
    (PieceState.ANNOUNCED, PieceEvent.ALLOCATED): PieceState.READING,
    (PieceState.READING, PieceEvent.COMPLETED): PieceState.LANDED,
    (PieceState.ANNOUNCED, PieceEvent.ROLLED_BACK): PieceState.ANNOUNCED,
    (PieceState.READING, PieceEvent.ROLLED_BACK): PieceState.ANNOUNCED,
    (PieceState.LANDED, PieceEvent.ROLLED_BACK): PieceState.ANNOUNCED,
}


def advance(state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """Return the request's state after ``event``, and what must be done because of it.

    Raises:
        InvalidTransitionError: ``event`` cannot happen in ``state``: a bug in the caller.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InvalidTransitionError(f"{event.name} in state {state.name}") from None


def advance_piece(state: PieceState, event: PieceEvent) -> PieceState:
    """Return the piece's state after ``event``.

    Raises:
        InvalidTransitionError: ``event`` cannot happen in ``state``: a bug in the caller.
    """
    try:
        return PIECE_TRANSITIONS[state, event]
    except KeyError:
        raise InvalidTransitionError(f"piece: {event.name} in state {state.name}") from None
