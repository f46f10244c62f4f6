"""The life of each sequence: placed, attempted, retried elsewhere, finished or given up.

Whatever ends a sequence early (client gone, stop string, timeout, shutdown) cancels its task, and
the task sends ``Abort`` if an attempt is under way. There is no other way out.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Items
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from core.config import SluiceConfig
from core.errors import InternalError, OverloadedError, RequestError
from core.ids import Attempt, RequestId, WorkerId
from core.logs import HandledRequest, request_context
from core.messages import Abort, Failed, Output
from router.attempt import AttemptFailure, RunningAttempt
from router.failures import GenerationTimeoutError, ShuttingDownError, WorkersLostError
from router.fleet import Fleet
from router.generation import Generation
from router.links import DecodeLink
from router.metrics import RouterMetrics
from router.policy import (
    POLICY,
    FailureKind,
    OwnLoad,
    Route,
    choose_route,
    may_retry,
    retry_delay_s,
)
from router.sequence import Sequence, SequenceSpec
from router.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass
class Dispatcher:
    """Runs sequences on the fleet. Owned by one event loop."""

    config: SluiceConfig
    fleet: Fleet
    tokenizer: Tokenizer
    metrics: RouterMetrics
    model: str
    _attempts: dict[RequestId, RunningAttempt] = field(
        default_factory=dict[RequestId, RunningAttempt]
    )
    _generations: set[Generation] = field(default_factory=set[Generation])
    _num_pending: int = 0
    _is_leaving: bool = False
    _is_stopping: bool = False

    def __post_init__(self) -> None:
        self._block_size = self.config.for_role("decode").cache.block_size
        self._trace = self.fleet.traces.recorder.record

    @asynccontextmanager
    async def generate(self, specs: Items[SequenceSpec]) -> AsyncGenerator[Generation]:
        """Run ``specs`` for as long as the context is open; on leaving nothing of them runs on.

        Raises:
            OverloadedError: too many sequences are pending. Nothing was started.
            RequestError: the request alone has more sequences than may be pending.
        """
        self._admit(len(specs))
        sequences = [Sequence(spec, self.tokenizer) for spec in specs]
        generation = Generation(sequences, metrics=self.metrics, model=self.model)
        self._generations.add(generation)
        tasks = [
            asyncio.create_task(self._run_and_report(generation, index))
            for index in range(len(sequences))
        ]
        try:
            yield generation
        finally:
            self._generations.discard(generation)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._num_pending -= len(specs)

    @property
    def num_unplaced(self) -> int:
        """Of ``num_pending``, those that no worker has."""
        return self._num_pending - len(self._attempts)

    @property
    def num_pending(self) -> int:
        """Sequences in the router now."""
        return self._num_pending

    @property
    def is_leaving(self) -> bool:
        """Whether the router is about to end, though it may still take requests."""
        return self._is_leaving

    @property
    def is_drained(self) -> bool:
        """Whether new requests are refused, and none is left."""
        return self._is_stopping and not self._num_pending

    def announce_end(self) -> None:
        """Have whoever asks told to send new requests elsewhere; those that come are taken."""
        self._is_leaving = True

    def refuse(self) -> None:
        """Refuse what comes from now on; what is pending goes on."""
        self._is_leaving = self._is_stopping = True

    def stop(self) -> None:
        """Fail everything pending and refuse what comes: the router stops."""
        self.refuse()
        for generation in list(self._generations):
            generation.end_cause = "shutdown"
            generation.fail(ShuttingDownError("the router is shutting down; try again"))

    def on_output(self, link: DecodeLink, output: Output) -> None:
        """See ``FleetListener``."""
        attempt = self._current(link, output.request_id, output.attempt)
        if attempt is None:
            self.metrics.stale_messages.labels(message="Output").inc()
            return
        if output.token_ids and not attempt.has_output:
            attempt.has_output = True
            self._trace(attempt.owner, "first_token")
        try:
            with self.metrics.overhead("output"):
                delta = attempt.sequence.feed(output)
        except Exception as error:
            log.exception(
                "event=feed_failed request=%s attempt=%d", output.request_id, output.attempt
            )
            self._end(attempt, "internal", f"the output cannot be turned into text: {error!r}")
            self._abort(attempt)
            return
        attempt.generation.put(attempt.index, delta)
        if delta.finish_reason is not None:
            if output.finish_reason is None:
                self._abort(attempt)
            attempt.end(None)
            del self._attempts[output.request_id]

    def on_failed(self, link: DecodeLink, failed: Failed) -> None:
        """See ``FleetListener``."""
        attempt = self._current(link, failed.request_id, failed.attempt)
        if attempt is None:
            self.metrics.stale_messages.labels(message="Failed").inc()
            return
        if failed.peer is not None:
            self.fleet.registry.suspect(failed.peer)
        if failed.kind == "draining":
            self.fleet.registry.drain(link.worker_id, link.incarnation)
        self._end(attempt, failed.kind, failed.reason, culprit=failed.peer, field=failed.field)

    def on_link_lost(self, link: DecodeLink) -> None:
        """See ``FleetListener``."""
        for attempt in [each for each in self._attempts.values() if each.link is link]:
            self._end(attempt, "worker_lost", f"decode worker {link.worker_id} was lost")

    def _admit(self, num_sequences: int) -> None:
        limit = self.config.router.max_pending_requests
        if self._is_stopping:
            raise ShuttingDownError("the router is shutting down; try again")
        if num_sequences > limit:
            raise RequestError(
                f"n: {num_sequences} sequences in one request, at most {limit} are served; "
                "lower n or send fewer prompts",
                field="n",
            )
        if self._num_pending + num_sequences > limit:
            self.metrics.rejections.labels(reason="queue_full").inc()
            raise OverloadedError(f"{self._num_pending} requests are pending; try again later")
        self._num_pending += num_sequences

    async def _run_and_report(self, generation: Generation, index: int) -> None:
        """Run one sequence to its end and tell the generation how it ended."""
        sequence = generation.sequences[index]
        self.metrics.input_tokens.labels(model=self.model).observe(
            len(sequence.spec.prompt_token_ids)
        )
        timeout_s = self.config.router.request_timeout_s
        ended = (sequence.spec.request_id, Attempt(0))
        try:
            async with asyncio.timeout(timeout_s):
                await self._run(generation, index)
        except TimeoutError:
            self._trace(ended, "failed", reason=f"over {timeout_s} s")
            self._count_cancelled(sequence, "timeout")
            generation.fail(GenerationTimeoutError(f"the request took longer than {timeout_s} s"))
        except asyncio.CancelledError:
            self._trace(ended, "left", cause=generation.end_cause)
            self._count_cancelled(sequence, generation.end_cause)
            raise
        except Exception as error:  # noqa: BLE001 - the top of a request: it ends with the error
            log.info("event=failed error=%s reason=%s", type(error).__name__, error)
            self._trace(ended, "failed", reason=f"{error!s:.200}")
            generation.fail(error)
        else:
            reason = sequence.finish_reason or ""
            self._trace(ended, "finished", tokens=len(sequence.token_ids), reason=reason)
            log.info(
                "event=finished reason=%s prompt_tokens=%d output_tokens=%d",
                sequence.finish_reason,
                len(sequence.spec.prompt_token_ids),
                len(sequence.token_ids),
            )
            generation.end(index)

    def _count_cancelled(self, sequence: Sequence, cause: str) -> None:
        stage = "decode" if sequence.token_ids else "prefill"
        self.metrics.cancellations.labels(stage=stage, cause=cause).inc()

    async def _run(self, generation: Generation, index: int) -> None:
        """Make attempts until one finishes.

        Raises:
            SluiceError: none did, and another one is not allowed or not possible.
        """
        avoid: set[WorkerId] = set()
        sequence = generation.sequences[index]
        num_refused = 0  # by workers that drain
        for number in count(1):
            request_context.set(HandledRequest(sequence.spec.request_id, Attempt(number)))
            with self.metrics.stage("route"):
                link, route = await self._place(sequence, avoid)
            future = asyncio.get_running_loop().create_future()
            attempt = RunningAttempt(
                Attempt(number), sequence, generation, index, link, route, ended=future
            )
            with self.metrics.stage("generate"):
                failure = await self._carry_out(attempt)
            if failure is None:
                return
            log.info("event=attempt_failed kind=%s reason=%s", failure.kind, failure.reason)
            self._trace(
                attempt.owner, "attempt_failed", kind=failure.kind, reason=f"{failure.reason:.200}"
            )
            num_refused += failure.kind == "draining"
            self._check_retry(attempt, failure, number - num_refused)
            avoid.add(failure.culprit)
            await asyncio.sleep(retry_delay_s(failure.kind, attempt=number - num_refused))

    async def _place(self, sequence: Sequence, avoid: set[WorkerId]) -> tuple[DecodeLink, Route]:
        """Wait, for a bounded time, until a decode worker can be chosen."""
        wait_s = self.config.router.admission_wait_s
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    with self.metrics.overhead("choose"):
                        route = self._choose(sequence, avoid)
                    link = None if route is None else self.fleet.link(route.decode)
                    if route is not None and link is not None:
                        return link, route
                    await self.fleet.changed()
        except TimeoutError as error:
            self.metrics.rejections.labels(reason="no_worker").inc()
            raise OverloadedError(
                f"no decode worker became ready in {wait_s} s; try again later"
            ) from error

    def _choose(self, sequence: Sequence, avoid: set[WorkerId]) -> Route | None:
        return choose_route(
            len(sequence.spec.prompt_token_ids) + len(sequence.token_ids),
            decode=[w for w in self.fleet.registry.usable("decode") if self.fleet.link(w)],
            prefill=self.fleet.registry.usable("prefill"),
            own=self._own_load(),
            local_prefill_max_tokens=self.config.router.local_prefill_max_tokens,
            block_size=self._block_size,
            avoid=avoid,
        )

    def _own_load(self) -> OwnLoad:
        sequences: Counter[WorkerId] = Counter()
        prefill_tokens: Counter[WorkerId] = Counter()
        for attempt in self._attempts.values():
            sequences[attempt.link.worker_id] += 1
            if attempt.route.prefill is not None and not attempt.has_output:
                num_tokens = len(attempt.sequence.spec.prompt_token_ids)
                prefill_tokens[attempt.route.prefill.worker_id] += num_tokens
        return OwnLoad(sequences, prefill_tokens)

    async def _carry_out(self, attempt: RunningAttempt) -> AttemptFailure | None:
        """Send the attempt and wait for its end; leaving early aborts it."""
        self._attempts[attempt.sequence.spec.request_id] = attempt
        attempt.link.send(attempt.message())
        self._trace(attempt.owner, "dispatched", **attempt.route.described())
        self.metrics.route_decisions.labels(
            policy=POLICY, path=attempt.route.path, reason=attempt.route.reason
        ).inc()
        try:
            return await attempt.ended
        finally:
            if self._attempts.get(attempt.sequence.spec.request_id) is attempt:
                del self._attempts[attempt.sequence.spec.request_id]
                self._abort(attempt)

    def _check_retry(
        self, attempt: RunningAttempt, failure: AttemptFailure, num_attempts: int
    ) -> None:
        """Count the retry after ``num_attempts``, or raise what the client is told instead."""
        kind, stage = failure.kind, attempt.stage
        max_attempts = self.config.router.max_attempts
        if may_retry(kind, attempt=num_attempts, max_attempts=max_attempts):
            self.metrics.retries.labels(stage=stage, reason=kind).inc()
            return
        if kind == "request":
            raise RequestError(failure.reason, field=failure.field)
        if kind == "internal":
            raise InternalError(failure.reason)
        self.metrics.retries_exhausted.labels(stage=stage, reason=kind).inc()
        message = f"{failure.reason} (attempt {num_attempts} of {max_attempts}); try again later"
        raise OverloadedError(message) if kind == "capacity" else WorkersLostError(message)

    def _current(
        self, link: DecodeLink, request_id: RequestId, number: Attempt
    ) -> RunningAttempt | None:
        """Return the attempt that a message is about, unless it is over or on another link."""
        attempt = self._attempts.get(request_id)
        if attempt is None or attempt.number != number or attempt.link is not link:
            return None
        return attempt

    def _end(
        self,
        attempt: RunningAttempt,
        kind: FailureKind,
        reason: str,
        *,
        culprit: WorkerId | None = None,
        field: str | None = None,
    ) -> None:
        """End ``attempt`` without a result; by default its decode worker is to blame."""
        del self._attempts[attempt.sequence.spec.request_id]
        attempt.end(AttemptFailure(kind, reason, culprit or attempt.link.worker_id, field))

    def _abort(self, attempt: RunningAttempt) -> None:
        attempt.link.send(Abort(attempt.sequence.spec.request_id, attempt.number))
