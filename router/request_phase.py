"""A sequence's life in the router, as a table.

    ──> QUEUED ──placed──> PREFILL ──first token──> DECODE ──finished, stopped──> FINISHED
          ^                   └──────attempt lost─────┤
          └──retry due── BACKOFF <────────────────────┘

From every phase that is not an end: no worker in time, out of attempts, out of time, unreadable
──> FAILED; client left ──> CANCELLED. An end stays: what comes later changes nothing.

Pure. What runs on a worker is aborted in the step that leaves it behind, unless the worker itself
has ended it or is lost with all that it had.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final


class Phase(Enum):
    """What a sequence waits for."""

    QUEUED = auto()
    """A decode worker that takes it."""
    PREFILL = auto()
    """The first token of its attempt."""
    DECODE = auto()
    """The rest."""
    BACKOFF = auto()
    """The time of its next attempt."""
    FINISHED = auto()
    """Nothing: the client has, or is about to get, all of it."""
    FAILED = auto()
    """Nothing: the client is told why."""
    CANCELLED = auto()
    """Nothing: there is nobody left to tell."""


ON_WORKER: Final = frozenset({Phase.PREFILL, Phase.DECODE})
"""In these a worker has, or may have, the sequence."""
ENDS: Final = frozenset({Phase.FINISHED, Phase.FAILED, Phase.CANCELLED})


class Event(Enum):
    """What happened to a sequence. What workers say is of its current attempt only."""

    PLACED = auto()
    """A worker was chosen."""
    NOT_PLACED = auto()
    """None was, for too long."""
    FIRST_TOKEN = auto()
    FINISHED = auto()
    """The worker has given the last token."""
    STOPPED = auto()
    """The text has met a stop string; the worker does not know and would go on."""
    UNREADABLE = auto()
    """The tokens cannot be turned into text; the worker would go on."""
    ATTEMPT_LOST = auto()
    """Nothing of the attempt is left on the worker, and another one is allowed."""
    ATTEMPTS_OVER = auto()
    """Nothing of the attempt is left on the worker, and another one is not."""
    RETRY_DUE = auto()
    GIVEN_UP = auto()
    """The request has taken too long, or cannot go on by a bug."""
    LEFT = auto()
    """Nobody waits for it any more."""


class Action(Enum):
    """What must be done because of it, in order."""

    DISPATCH = auto()
    """Send the attempt to the worker."""
    ABORT = auto()
    """Tell the worker to end the attempt."""
    ANSWER = auto()
    """Tell the client how it ended: the only time."""


_DISPATCHED = (Phase.PREFILL, (Action.DISPATCH,))
_FAILED = (Phase.FAILED, (Action.ANSWER,))
_FAILED_ON_WORKER = (Phase.FAILED, (Action.ABORT, Action.ANSWER))
_STOPPED = (Phase.FINISHED, (Action.ABORT, Action.ANSWER))

TRANSITIONS: Final[Mapping[tuple[Phase, Event], tuple[Phase, tuple[Action, ...]]]] = {
    (Phase.QUEUED, Event.PLACED): _DISPATCHED,
    (Phase.QUEUED, Event.NOT_PLACED): _FAILED,
    (Phase.QUEUED, Event.GIVEN_UP): _FAILED,
    (Phase.QUEUED, Event.LEFT): (Phase.CANCELLED, ()),
    (Phase.PREFILL, Event.FIRST_TOKEN): (Phase.DECODE, ()),
    **{
        (phase, event): after
        for phase in ON_WORKER
        for event, after in {
            Event.FINISHED: (Phase.FINISHED, (Action.ANSWER,)),
            Event.STOPPED: _STOPPED,
            Event.UNREADABLE: _FAILED_ON_WORKER,
            Event.ATTEMPT_LOST: (Phase.BACKOFF, ()),
            Event.ATTEMPTS_OVER: _FAILED,
            Event.GIVEN_UP: _FAILED_ON_WORKER,
            Event.LEFT: (Phase.CANCELLED, (Action.ABORT,)),
        }.items()
    },
    (Phase.BACKOFF, Event.RETRY_DUE): (Phase.QUEUED, ()),
    (Phase.BACKOFF, Event.GIVEN_UP): _FAILED,
    (Phase.BACKOFF, Event.LEFT): (Phase.CANCELLED, ()),
}


def advance(phase: Phase, event: Event) -> tuple[Phase, tuple[Action, ...]]:
    """Return the phase after ``event``, and what must be done because of it.

    Two things can happen at once, a client's leaving and the last token, say: whichever is taken
    second finds a phase that it does not concern, and changes nothing.
    """
    return TRANSITIONS.get((phase, event), (phase, ()))
