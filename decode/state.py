"""A sequence's life on a decode worker, as a table.

                 ┌──────────preempted──────────┐
                 v                             │
    ──local──> WAITING ──────admitted──────> RUNNING ──finished──> GONE
                 │ ^ ^preempted                ^  └────aborted──────^
      load began │ │ └──────────────┐          │admitted            │
                 v │load failed     │          │                    │
               LOADING ──loaded──> READY ──────┘                    │
    ──remote─> REMOTE ──delivered───^ └────aborted──────────────────^
                 └─aborted, lost────────────────────────────────────┘

    LOADING ──aborted──> GONE as well; REMOTE ──load failed──> WAITING where that is the policy.

Pure. Steps, reads and copies still in flight are not a state of the sequence: its blocks wait for
them in ``blockmgr`` after it is GONE, so every end releases at once.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from core.errors import InvalidTransitionError


class State(Enum):
    """Where a sequence is."""

    WAITING = auto()
    """Owns no block; its KV will be computed here."""
    LOADING = auto()
    """Owns all its blocks; KV that a tier has is being copied into them."""
    REMOTE = auto()
    """A prefill worker computes its KV, or reads of it are in progress."""
    READY = auto()
    """Its KV, received or loaded, is here; waits for a place in the batch."""
    RUNNING = auto()
    """In the batch: prefill chunks or decode tokens."""
    GONE = auto()
    """Has released its blocks; whatever still arrives for it is dropped."""


class Event(Enum):
    """What happened to a sequence."""

    ADMITTED = auto()
    LOAD_BEGAN = auto()
    LOADED = auto()
    LOAD_FAILED = auto()
    DELIVERED = auto()
    PREEMPTED = auto()
    FINISHED = auto()
    ABORTED = auto()
    PREFILL_LOST = auto()


class Action(Enum):
    """What must be done because of it, in order."""

    CANCEL_READS = auto()
    RELEASE_BLOCKS = auto()
    FREE_SLOT = auto()


_END_OF_RUNNING = (Action.RELEASE_BLOCKS, Action.FREE_SLOT)

TRANSITIONS: Final[Mapping[tuple[State, Event], tuple[State, tuple[Action, ...]]]] = {
    (State.WAITING, Event.ADMITTED): (State.RUNNING, ()),
    (State.WAITING, Event.ABORTED): (State.GONE, ()),
    (State.WAITING, Event.LOAD_BEGAN): (State.LOADING, ()),
    (State.LOADING, Event.LOADED): (State.READY, ()),
    (State.LOADING, Event.LOAD_FAILED): (State.WAITING, (Action.RELEASE_BLOCKS,)),
    (State.LOADING, Event.ABORTED): (State.GONE, (Action.RELEASE_BLOCKS,)),
    (State.REMOTE, Event.DELIVERED): (State.READY, ()),
    (State.REMOTE, Event.LOAD_FAILED): (State.WAITING, (Action.RELEASE_BLOCKS,)),
    (State.REMOTE, Event.PREFILL_LOST): (State.GONE, (Action.RELEASE_BLOCKS,)),
    (State.REMOTE, Event.ABORTED): (State.GONE, (Action.CANCEL_READS, Action.RELEASE_BLOCKS)),
    (State.READY, Event.ADMITTED): (State.RUNNING, ()),
    (State.READY, Event.PREEMPTED): (State.WAITING, (Action.RELEASE_BLOCKS,)),
    (State.READY, Event.ABORTED): (State.GONE, (Action.RELEASE_BLOCKS,)),
    (State.READY, Event.FINISHED): (State.GONE, (Action.RELEASE_BLOCKS,)),
    (State.RUNNING, Event.PREEMPTED): (State.WAITING, _END_OF_RUNNING),
    (State.RUNNING, Event.FINISHED): (State.GONE, _END_OF_RUNNING),
    (State.RUNNING, Event.ABORTED): (State.GONE, _END_OF_RUNNING),
    (State.GONE, Event.ABORTED): (State.GONE, ()),  # the client left after the last token
}


def advance(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """Return the state after ``event``, and what must be done because of it.

    Raises:
        InvalidTransitionError: ``event`` cannot happen in ``state``: a bug in the caller.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InvalidTransitionError(f"{event.name} in state {state.name}") from None
