"""One attempt of one sequence on one decode worker."""

import asyncio
from dataclasses import dataclass

from core.ids import Attempt, Owner, WorkerId
from core.messages import Generate, PrefillPeer
from router.generation import Generation
from router.links import DecodeLink
from router.policy import FailureKind, Route
from router.sequence import Sequence


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """How an attempt ended without a result."""

    kind: FailureKind
    reason: str
    culprit: WorkerId
    """Avoided by the next attempt."""
    field: str | None = None
    """Of the request, where that is at fault."""


@dataclass(slots=True)
class RunningAttempt:
    """An attempt under way. ``ended`` gets None with the last output, or the failure."""

    number: Attempt
    sequence: Sequence
    generation: Generation
    index: int
    """Of the sequence in its generation."""
    link: DecodeLink
    route: Route
    ended: asyncio.Future[AttemptFailure | None]
    has_output: bool = False

    @property
    def owner(self) -> Owner:
        """Whose the attempt is."""
        return self.sequence.spec.request_id, self.number

    @property
    def stage(self) -> str:
        """What the attempt is waiting for: its first token (``prefill``) or more (``decode``)."""
        return "decode" if self.has_output else "prefill"

    def end(self, failure: AttemptFailure | None) -> None:
        """Record the end; the first one counts."""
        if not self.ended.done():
            self.ended.set_result(failure)

    def message(self) -> Generate:
        """Return what starts this attempt: it goes on after the tokens of earlier ones."""
        spec = self.sequence.spec
        prefill = self.route.prefill
        return Generate(
            request_id=spec.request_id,
            attempt=self.number,
            prompt_token_ids=spec.prompt_token_ids,
            sampling=spec.sampling,
            output_token_ids=tuple(self.sequence.token_ids),
            prefill=None
            if prefill is None
            else PrefillPeer(prefill.worker_id, prefill.incarnation, prefill.heartbeat.address),
            cache_salt=spec.cache_salt,
        )
