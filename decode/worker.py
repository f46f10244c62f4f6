"""A decode worker: one event loop that owns all state, one engine thread that sees batches only."""

import asyncio
import logging
import time
from functools import partial

from blockmgr.fences import KVWriters
from blockmgr.worker_blocks import WorkerBlocks
from core.channel import ClientId, ClientLost, ServerChannel
from core.ids import Incarnation, new_incarnation
from core.lifecycle import Lifecycle, Work
from core.messages import (
    Abort,
    AnyMessage,
    Generate,
    Hello,
    Peers,
    Refused,
    Welcome,
)
from core.trace import Recorder
from core.worker_context import WorkerContext
from core.worker_report import ReportedCache, ReportedLoad, ReportedServer, WorkerReport
from decode.delivery import Delivery, Loss
from decode.receiver_opening import open_receiver
from decode.requests import Requests
from decode.scheduler import DecodeScheduler
from decode.tracing import DecodeTrace
from engine.batch import StepBatch, StepOutput
from engine.host_arena import HostArena
from engine.step_loop import StepLoop
from ranks.leader import Ranks
from transfer.tiers.opening import open_mover

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


async def run_decode(context: WorkerContext, lifecycle: Lifecycle) -> None:
    """Serve as decode worker until ``stop`` or until the end of a drain.

    Raises:
        ConfigError: the model, a size or a port cannot be used.
        InternalError: an invariant broke; the process must end and be started anew.
    """
    incarnation = new_incarnation()
    ranks = await Ranks.start(context, "decode", incarnation=incarnation)
    try:
        worker = DecodeWorker(context, ranks, incarnation, lifecycle)
        try:
            await worker.serve()
        finally:
            await worker.close()
    finally:
        await ranks.close()


class DecodeWorker:
    """The only place on decode where tokens, blocks and transfers meet; it decides nothing."""

    def __init__(
        self,
        context: WorkerContext,
        ranks: Ranks,
        incarnation: Incarnation,
        lifecycle: Lifecycle,
    ) -> None:
        config = context.config
        engine = ranks.engine
        self._context = context
        self._ranks = ranks
        self._incarnation = incarnation
        self._lifecycle = lifecycle
        self._clock = asyncio.get_running_loop().time
        watched = WorkerBlocks.make(
            engine.layout,
            engine.pool,
            config,
            incarnation=self._incarnation,
            writers=KVWriters.CONSUMER if config.deploy.prefill else KVWriters.NONE,
            clock=self._clock,
        )
        self._blocks = watched.manager
        self._scheduler = DecodeScheduler(
            self._blocks,
            engine.layout,
            config.scheduler,
            fingerprint=engine.spec.fingerprint,
            tiers=watched.tiers,
        )
        self._num_preemptions_seen = 0
        self._steps = StepLoop(
            engine.runner,
            depth=config.scheduler.overlap_depth,
            schedule=self._schedule,
            complete=self._complete,
            fail=self._scheduler.fail_step,
        )
        self._server = ServerChannel(
            host=context.host,
            keys=context.keys,
            incarnation=self._incarnation,
            welcome=self._welcome,
        )
        recorder = Recorder(time.monotonic, max_requests=config.trace_requests)
        self._trace = DecodeTrace(recorder)
        self._report = WorkerReport(
            "decode",
            context,
            lifecycle,
            incarnation=self._incarnation,
            server=ReportedServer(self._server.address, engine.max_model_len),
            load=ReportedLoad(self._scheduler, self._blocks),
            cache=ReportedCache(watched.control, self._finish_reset),
            trace=recorder,
        )
        self._metrics = self._report.metrics
        self._metrics.gauge(
            "sluice_admission_reserve_blocks",
            "Blocks kept free per running sequence and KV group for its growth",
            lambda: self._scheduler.reserve_blocks,
        )
        watched.export(self._metrics.registry, role="decode")
        self._server.rejects.export(self._metrics.registry)
        self._mover = open_mover(
            watched.tiers,
            partial(HostArena, engine.pool),
            config.cache,
            layout=engine.layout,
            model_fingerprint=engine.spec.fingerprint,
            metrics=(self._metrics.registry, "decode"),
            on_change=self.memory_changed,
        )
        self._receiver = None
        if config.deploy.prefill:
            self._receiver = open_receiver(
                context,
                ranks,
                incarnation=incarnation,
                blocks=self._blocks,
                scheduler=self._scheduler,
                owner=self,
                metrics=self._metrics,
                trace=self._trace,
            )
        self._requests = Requests(
            self._scheduler,
            self._receiver,
            self._server,
            self._trace,
            self._metrics,
            config=config,
            vocabulary=engine.spec,
            memory_changed=self.memory_changed,
        )
        transport = "none" if self._receiver is None else self._receiver.transport
        self._report.describe(engine.compatibility, transport=transport)

    async def serve(self) -> None:
        """Serve until ``stop``, the end of a drain, or until a part of the worker fails.

        Raises:
            ConfigError: the storage tier cannot be used.
        """
        await self._mover.check()
        log.info("event=ready address=%s incarnation=%s", self._server.address, self._incarnation)
        parts = [self._receive(), self._steps.run(), self._report.run(), self._ranks.watch()]
        if self._receiver is not None:
            parts.append(self._receiver.run())
        await self._lifecycle.run(self._work(), *parts)

    def _work(self) -> Work:
        return Work(
            self._incarnation,
            is_idle=lambda: self._requests.num_live == 0,
            num_steps=lambda: self._steps.num_completed,
            oldest_step_at=self._steps.oldest_submitted_at,
        )

    async def close(self) -> None:
        """Stop everything that this worker has started, reads in progress last of all."""
        self._steps.close(timeout_s=CLOSE_TIMEOUT_S)
        await self._mover.close(timeout_s=CLOSE_TIMEOUT_S)
        if self._receiver is not None:
            await self._receiver.close()
        self._server.close()
        self._report.close()

    # Messages

    def _welcome(self, client: ClientId, hello: Hello) -> Welcome | Refused:
        log.info("event=client_connected client=%s", hello.name)
        del client
        return Welcome(worker_id=self._context.worker_id, incarnation=self._incarnation)

    async def _receive(self) -> None:
        while True:
            client, message = await self._server.receive()
            self._take(client, message)

    def _take(self, client: ClientId, message: AnyMessage | ClientLost) -> None:
        match message:
            case Generate() if self._lifecycle.drain.is_set():
                self._requests.refuse(client, message)
            case Generate():
                if self._requests.take(client, message):
                    self._mover.carry_out()
                    self._steps.wake()
            case Peers():
                if self._receiver is not None:
                    self._receiver.announced(client, message)
            case Abort():
                self._requests.abort(client, (message.request_id, message.attempt))
            case ClientLost():
                if self._receiver is not None:
                    self._receiver.router_lost(client)
                self._requests.lose_router(client)
            case _:
                log.warning("dropped=%s reason=not for decode", type(message).__name__)

    # What reads bring

    def memory_changed(self) -> None:
        """See ``ReceiverOwner``: whoever waits for blocks looks again."""
        self._lifecycle.changed()
        self._mover.carry_out()
        self._steps.wake()
        if self._receiver is not None:
            self._receiver.retry_allocations()

    async def _finish_reset(self, timeout_s: float) -> None:
        """What the cache had is free; what the tiers must do is begun now, not by some request."""
        self.memory_changed()
        await self._mover.wait_marked(timeout_s=timeout_s)

    def delivered(self, delivery: Delivery) -> None:
        """See ``ReceiverOwner``."""
        self._requests.deliver(delivery)
        self.memory_changed()

    def lost(self, loss: Loss) -> None:
        """See ``ReceiverOwner``."""
        self._requests.lose(loss)
        self.memory_changed()

    # What steps bring

    def _schedule(self) -> StepBatch | None:
        """Schedule, and let tickets look again at the memory that a preemption gave back."""
        batch = self._scheduler.schedule()
        new = self._scheduler.num_preemptions - self._num_preemptions_seen
        if new:
            self._num_preemptions_seen += new
            self._metrics.count_preemptions(new)
            if self._receiver is not None:
                self._receiver.retry_allocations()
        self._mover.carry_out()
        return batch

    def _complete(self, batch: StepBatch, output: StepOutput) -> None:
        self._metrics.observe_step(
            duration_s=output.duration_s,
            num_tokens=batch.num_tokens,
            num_sequences=len(batch.sequences),
        )
        self._trace.step(self._scheduler.prompt_parts(batch.step), output.duration_s)
        progress = self._scheduler.complete(output)
        self._metrics.count_generated(len(progress))
        self._requests.tell(progress)
        self._lifecycle.changed()
        self._mover.carry_out()
        if self._receiver is not None:
            self._receiver.retry_allocations()
