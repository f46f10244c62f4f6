"""Tells of a sequence's end whom it concerns: the client, the request's trace, log and metrics."""

import logging
from dataclasses import dataclass

from core.ids import Attempt
from core.trace import EventName, Recorder
from router.failures import GenerationTimeoutError
from router.metrics import CancelCause, RouterMetrics
from router.request_phase import Phase
from router.running import RunningSequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endings:
    """Of all sequences of a router."""

    metrics: RouterMetrics
    recorder: Recorder

    def answer(self, running: RunningSequence) -> None:
        """Tell the client that all was sent, or why not."""
        sequence, error = running.sequence, running.life.error
        if error is None:
            reason = sequence.finish_reason or ""
            self._trace(running, "finished", tokens=len(sequence.token_ids), reason=reason)
            running.generation.end(running.index)
        else:
            self._trace(running, "failed", reason=f"{error!s:.200}")
            running.generation.fail(error)

    def report(self, running: RunningSequence) -> None:
        """Tell operators, in the sequence's own task: its lines name the request."""
        life, sequence = running.life, running.sequence
        if life.phase is Phase.FINISHED:
            log.info(
                "event=finished reason=%s prompt_tokens=%d output_tokens=%d",
                sequence.finish_reason,
                len(sequence.spec.prompt_token_ids),
                len(sequence.token_ids),
            )
        elif life.phase is Phase.FAILED:
            log.info("event=failed error=%s reason=%s", type(life.error).__name__, life.error)
            if isinstance(life.error, GenerationTimeoutError):
                self._count_cancelled(running, "timeout")
        else:
            cause = running.generation.end_cause
            self._trace(running, "left", cause=cause)
            self._count_cancelled(running, cause)

    def _trace(self, running: RunningSequence, event: EventName, **values: str | int) -> None:
        """Record the end of the request, not of one of its attempts."""
        self.recorder.record((running.sequence.spec.request_id, Attempt(0)), event, **values)

    def _count_cancelled(self, running: RunningSequence, cause: CancelCause) -> None:
        stage = "decode" if running.sequence.token_ids else "prefill"
        self.metrics.cancellations.labels(stage=stage, cause=cause).inc()
