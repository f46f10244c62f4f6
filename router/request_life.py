"""Which attempt of a sequence runs, whether there is another one, and how the sequence ends. Pure.

A retry goes on where the lost attempt stopped: what the client was sent is given to the next
worker as tokens that are there already, so it never sees a token twice, nor one of another answer.
"""

from dataclasses import dataclass

from core.errors import InternalError, OverloadedError, RequestError
from core.ids import Attempt, Incarnation, WorkerId
from router.failures import GenerationTimeoutError, WorkersLostError
from router.policy import FailureKind, Route, may_retry, retry_delay_s
from router.request_phase import ENDS, ON_WORKER, Action, Event, Phase, advance

Actions = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """How an attempt ended without a result."""

    kind: FailureKind
    reason: str
    peer: WorkerId | None = None
    """Whose fault it was, where it was not the decode worker's."""
    field: str | None = None
    """Of the request, where that is at fault."""


class RequestLife:
    """One sequence from its arrival to its one end. Each method takes one event.

    Invariants (``check_invariants``):
        * ``route`` is there exactly while a worker may have the sequence;
        * ``error`` is there exactly where it has failed;
        * attempts are at most ``max_attempts``, and one for each worker's life that refused it
          because it drains.
    """

    def __init__(self, *, max_attempts: int) -> None:
        self.phase = Phase.QUEUED
        self.attempt = Attempt(0)
        """The last one that was dispatched; 0 before."""
        self.route: Route | None = None
        """Where it runs."""
        self.failure: AttemptFailure | None = None
        """Of the last attempt that ended without a result."""
        self.error: Exception | None = None
        """What the client is told."""
        self.avoid: set[WorkerId] = set()
        """Had to do with an earlier failure."""
        self.retry_delay_s = 0.0
        """How long ``BACKOFF`` takes."""
        self._max_attempts = max_attempts
        self._drained: set[tuple[WorkerId, Incarnation]] = set()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen."""
        return self.phase in ENDS

    @property
    def num_counted(self) -> int:
        """Attempts that count: a worker that drains has refused before it did anything."""
        return self.attempt - len(self._drained)

    @property
    def stage(self) -> str:
        """Which stage of the current attempt a failure would meet."""
        return "decode" if self.phase is Phase.DECODE else "prefill"

    def is_current(self, attempt: Attempt, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        """Whether what this life of a worker says of ``attempt`` is news."""
        return attempt == self.attempt and self.is_on(worker_id, incarnation)

    def is_on(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        """Whether the current attempt is on this life of a worker."""
        return self.route is not None and _life_of(self.route) == (worker_id, incarnation)

    def placed(self, route: Route) -> Actions:
        """A worker was chosen."""
        if self.phase is not Phase.QUEUED:
            return ()
        self.attempt = Attempt(self.attempt + 1)
        self.route = route
        return self._advance(Event.PLACED)

    def not_placed(self, error: OverloadedError) -> Actions:
        """No worker could be chosen for too long."""
        return self._fail(Event.NOT_PLACED, error)

    def gave_token(self) -> Actions:
        """The current attempt has given a token; all but its first are no event."""
        return self._advance(Event.FIRST_TOKEN)

    def finished(self, *, by_worker: bool) -> Actions:
        """The text is complete; the worker knows that only where it ended it."""
        return self._advance(Event.FINISHED if by_worker else Event.STOPPED)

    def unreadable(self, reason: str) -> Actions:
        """The current attempt gives what is no text."""
        return self._fail(Event.UNREADABLE, InternalError(reason))

    def attempt_failed(self, failure: AttemptFailure) -> Actions:
        """The current attempt is over on its worker, which has said so or is lost."""
        if self.route is None:
            return ()
        life = _life_of(self.route)
        kind = failure.kind
        if kind == "draining" and life not in self._drained:
            self._drained.add(life)
        elif kind == "draining":
            kind = "capacity"  # it refuses, and says that it is ready
        self.failure = failure
        number = self.num_counted
        if not may_retry(kind, attempt=number, max_attempts=self._max_attempts):
            return self._fail(Event.ATTEMPTS_OVER, self._error_of(failure, kind))
        self.avoid.add(failure.peer or life[0])
        self.retry_delay_s = retry_delay_s(kind, attempt=number)
        return self._advance(Event.ATTEMPT_LOST)

    def retry_due(self) -> Actions:
        """The next attempt may be placed."""
        return self._advance(Event.RETRY_DUE)

    def timed_out(self, timeout_s: float) -> Actions:
        """The request has taken longer than any may."""
        reason = f"the request took longer than {timeout_s} s"
        return self._fail(Event.GIVEN_UP, GenerationTimeoutError(reason))

    def broke(self, error: Exception) -> Actions:
        """A bug: it cannot go on."""
        return self._fail(Event.GIVEN_UP, error)

    def left(self) -> Actions:
        """Nobody waits for it any more."""
        return self._advance(Event.LEFT)

    def _fail(self, event: Event, error: Exception) -> Actions:
        was_over = self.is_over
        actions = self._advance(event)
        if self.phase is Phase.FAILED and not was_over:
            self.error = error
        return actions

    def _advance(self, event: Event) -> Actions:
        self.phase, actions = advance(self.phase, event)
        if self.phase not in ON_WORKER:
            self.route = None
        return actions

    def _error_of(self, failure: AttemptFailure, kind: FailureKind) -> Exception:
        if kind == "request":
            return RequestError(failure.reason, field=failure.field)
        if kind == "internal":
            return InternalError(failure.reason)
        tried = f"attempt {self.num_counted} of {self._max_attempts}"
        message = f"{failure.reason} ({tried}); try again later"
        return OverloadedError(message) if kind == "capacity" else WorkersLostError(message)

    def check_invariants(self) -> None:
        """Assert the invariants above."""
        assert (self.route is not None) == (self.phase in ON_WORKER), "where it runs is wrong"
        assert (self.error is not None) == (self.phase is Phase.FAILED), "an error without failure"
        assert 0 <= self.num_counted <= self._max_attempts, "too many attempts"


def _life_of(route: Route) -> tuple[WorkerId, Incarnation]:
    return route.decode.worker_id, route.decode.incarnation
