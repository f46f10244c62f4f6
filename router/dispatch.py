"""Carries out what ``request_life`` decides: chooses workers, sends, waits, and tells the client.

Whatever ends a sequence early (client gone, timeout, shutdown) cancels its task, and the task tells
the sequence's life, which knows whether a worker must be told. There is no other way out.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Items
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from core.config import SluiceConfig
from core.errors import OverloadedError
from core.ids import Attempt, RequestId
from core.logs import HandledRequest, request_context
from core.messages import Failed, Output
from router.admission import Admission
from router.endings import Endings
from router.failures import ShuttingDownError
from router.fleet import Fleet
from router.generation import Generation
from router.links import DecodeLink
from router.metrics import RouterMetrics
from router.placing import Placer
from router.policy import POLICY
from router.request_life import Actions, AttemptFailure, RequestLife
from router.request_phase import Action, Phase
from router.running import RunningSequence
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
    _running: dict[RequestId, RunningSequence] = field(
        default_factory=dict[RequestId, RunningSequence]
    )
    _generations: set[Generation] = field(default_factory=set[Generation])

    def __post_init__(self) -> None:
        self.admission = Admission(
            max_pending=self.config.router.max_pending_requests, metrics=self.metrics
        )
        self._placer = Placer(self.config, self.fleet, self.metrics, self._on_workers)
        self._endings = Endings(self.metrics, self.fleet.traces.recorder)
        self._trace = self.fleet.traces.recorder.record

    @asynccontextmanager
    async def generate(self, specs: Items[SequenceSpec]) -> AsyncGenerator[Generation]:
        """Run ``specs`` for as long as the context is open; on leaving nothing of them runs on.

        Raises:
            OverloadedError: too many sequences are pending. Nothing was started.
            RequestError: the request alone has more sequences than may be pending.
        """
        self.admission.take(len(specs))
        sequences = [Sequence(spec, self.tokenizer) for spec in specs]
        generation = Generation(sequences, metrics=self.metrics, model=self.model)
        self._generations.add(generation)
        tasks = [
            asyncio.create_task(self._run(self._begin(generation, index)))
            for index in range(len(sequences))
        ]
        try:
            yield generation
        finally:
            self._generations.discard(generation)
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # also where whoever leaves is cancelled meanwhile: their places are free
                for spec in specs:
                    del self._running[spec.request_id]
                self.admission.give_back(len(specs))

    @property
    def num_unplaced(self) -> int:
        """Sequences that wait for a worker."""
        return sum(
            not (running.is_on_worker or running.life.is_over) for running in self._running.values()
        )

    def stop(self) -> None:
        """Fail everything pending and refuse what comes: the router stops."""
        self.admission.refuse()
        for generation in list(self._generations):
            generation.end_cause = "shutdown"
            generation.fail(ShuttingDownError("the router is shutting down; try again"))

    # What workers say

    def on_output(self, link: DecodeLink, output: Output) -> None:
        """See ``FleetListener``."""
        running = self._current(link, output)
        if running is None:
            return
        if output.token_ids and running.life.phase is Phase.PREFILL:
            self._trace(running.owner, "first_token")
            self._do(running, running.life.gave_token())
        try:
            with self.metrics.overhead("output"):
                delta = running.sequence.feed(output)
        except Exception as error:
            log.exception("event=feed_failed request=%s attempt=%d", *running.owner)
            reason = f"the output cannot be turned into text: {error!r}"
            self._do(running, running.life.unreadable(reason))
            return
        running.generation.put(running.index, delta)
        if delta.finish_reason is not None:
            is_known = output.finish_reason is not None
            self._do(running, running.life.finished(by_worker=is_known))

    def on_failed(self, link: DecodeLink, failed: Failed) -> None:
        """See ``FleetListener``."""
        running = self._current(link, failed)
        if running is None:
            return
        if failed.peer is not None:
            self.fleet.registry.suspect(failed.peer)
        if failed.kind == "draining":
            self.fleet.registry.drain(link.worker_id, link.incarnation)
        self._end_attempt(
            running, AttemptFailure(failed.kind, failed.reason, failed.peer, failed.field)
        )

    def on_link_lost(self, link: DecodeLink) -> None:
        """See ``FleetListener``."""
        reason = f"decode worker {link.worker_id} was lost"
        for running in self._on_workers():
            if running.life.is_on(link.worker_id, link.incarnation):
                self._end_attempt(running, AttemptFailure("worker_lost", reason))

    def _on_workers(self) -> list[RunningSequence]:
        return [running for running in self._running.values() if running.is_on_worker]

    def _current(self, link: DecodeLink, message: Output | Failed) -> RunningSequence | None:
        """Return what ``message`` is about, unless it is over or on another worker."""
        running = self._running.get(message.request_id)
        if running is not None and running.life.is_current(
            message.attempt, link.worker_id, link.incarnation
        ):
            return running
        self.metrics.stale_messages.labels(message=type(message).__name__).inc()
        return None

    def _end_attempt(self, running: RunningSequence, failure: AttemptFailure) -> None:
        """The attempt is over on its worker: count what follows, and do it."""
        stage, owner = running.life.stage, running.owner
        self._trace(owner, "attempt_failed", kind=failure.kind, reason=f"{failure.reason:.200}")
        actions = running.life.attempt_failed(failure)
        if running.life.phase is Phase.BACKOFF:
            self.metrics.retries.labels(stage=stage, reason=failure.kind).inc()
        elif failure.kind not in {"request", "internal"}:
            self.metrics.retries_exhausted.labels(stage=stage, reason=failure.kind).inc()
        self._do(running, actions)

    # From the arrival to the end

    def _begin(self, generation: Generation, index: int) -> RunningSequence:
        life = RequestLife(max_attempts=self.config.router.max_attempts)
        running = RunningSequence(generation, index, life)
        spec = running.sequence.spec
        self._running[spec.request_id] = running
        self.metrics.input_tokens.labels(model=self.model).observe(len(spec.prompt_token_ids))
        return running

    async def _run(self, running: RunningSequence) -> None:
        """Wait for what the sequence waits for, phase by phase, to its end."""
        timeout_s = self.config.router.request_timeout_s
        life = running.life
        try:
            async with asyncio.timeout(timeout_s):
                while not life.is_over:
                    await self._wait(running)
        except TimeoutError:
            self._do(running, life.timed_out(timeout_s))
        except asyncio.CancelledError:
            self._do(running, life.left())
            raise
        except Exception as error:
            log.exception("event=run_failed")
            self._do(running, life.broke(error))
        finally:
            self._endings.report(running)

    async def _wait(self, running: RunningSequence) -> None:
        """Return when the phase may have changed."""
        life = running.life
        if running.is_on_worker:
            with self.metrics.stage("generate"):
                await running.moved_on.wait()
        elif life.phase is Phase.BACKOFF:
            assert life.failure is not None, "there is nothing to retry without"
            log.info(
                "event=attempt_failed kind=%s reason=%s", life.failure.kind, life.failure.reason
            )
            await asyncio.sleep(life.retry_delay_s)
            self._do(running, life.retry_due())
        else:
            name = (running.sequence.spec.request_id, Attempt(life.attempt + 1))
            request_context.set(HandledRequest(*name))
            with self.metrics.stage("route"):
                await self._place(running)

    async def _place(self, running: RunningSequence) -> None:
        try:
            running.link, route = await self._placer.place(running)
        except OverloadedError as error:
            self._do(running, running.life.not_placed(error))
        else:
            self._do(running, running.life.placed(route))

    # What a sequence's life asks for

    def _do(self, running: RunningSequence, actions: Actions) -> None:
        for action in actions:
            match action:
                case Action.DISPATCH:
                    self._dispatch(running)
                case Action.ABORT:
                    running.abort()
                case Action.ANSWER:
                    self._endings.answer(running)
        if not running.is_on_worker:
            running.moved_on.set()

    def _dispatch(self, running: RunningSequence) -> None:
        route = running.dispatch()
        self._trace(running.owner, "dispatched", **route.described())
        self.metrics.route_decisions.labels(
            policy=POLICY, path=route.path, reason=route.reason
        ).inc()
