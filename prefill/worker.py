"""A prefill worker: computes prompts chunk by chunk and offers their KV by tickets."""

import asyncio
import logging
import time
from functools import partial

from blockmgr.fences import KVWriters
from blockmgr.worker_blocks import WorkerBlocks
from core.channel import ClientId, ClientLost, ServerChannel
from core.errors import HandshakeError, OverloadedError, RequestError
from core.ids import Incarnation, Owner, new_incarnation
from core.lifecycle import Lifecycle, Work
from core.messages import (
    AnyMessage,
    Hello,
    Prefill,
    Reading,
    Refused,
    Released,
    Renew,
    Welcome,
    Withdraw,
)
from core.trace import Recorder
from core.worker_context import WorkerContext
from core.worker_report import ReportedCache, ReportedLoad, ReportedServer, WorkerReport
from engine.batch import StepBatch, StepOutput
from engine.host_arena import HostArena
from engine.step_loop import StepLoop
from prefill.readers import Readers
from prefill.scheduler import PrefillScheduler
from prefill.ticketing import Ticketing
from prefill.tracing import PrefillTrace
from ranks.leader import Ranks
from transfer.handshake import check_compatible
from transfer.metrics import REGISTERED_BYTES, TransferMetrics
from transfer.tickets import TicketBook
from transfer.tiers.opening import open_mover

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


async def run_prefill(context: WorkerContext, lifecycle: Lifecycle) -> None:
    """Serve as prefill worker until ``stop`` or until the end of a drain.

    Raises:
        ConfigError: the model, a size or a port cannot be used.
        InternalError: an invariant broke; the process must end and be started anew.
    """
    incarnation = new_incarnation()
    ranks = await Ranks.start(context, "prefill", incarnation=incarnation)
    try:
        worker = PrefillWorker(context, ranks, incarnation, lifecycle)
        try:
            await worker.serve()
        finally:
            await worker.close()
    finally:
        await ranks.close()


class PrefillWorker:
    """The only place on prefill where tokens, blocks and transfers meet; it decides nothing."""

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
        self._engine = engine
        self._incarnation = incarnation
        self._lifecycle = lifecycle
        self._clock = asyncio.get_running_loop().time
        watched = WorkerBlocks.make(
            engine.layout,
            engine.pool,
            config,
            incarnation=self._incarnation,
            writers=KVWriters.PRODUCER,
            clock=self._clock,
        )
        self._blocks = watched.manager
        self._scheduler = PrefillScheduler(
            self._blocks,
            engine.layout,
            config.scheduler,
            fingerprint=engine.spec.fingerprint,
            tiers=watched.tiers,
            layer_ranges=config.transfer.layer_ranges,
        )
        self._compatibility = engine.compatibility
        self._book = TicketBook(self._incarnation, lease_s=config.transfer.lease_s)
        self._source = ranks.open_source()
        self._steps = StepLoop(
            engine.runner,
            depth=config.scheduler.overlap_depth,
            schedule=self._schedule,
            complete=self._complete,
            fail=self._scheduler.fail_step,
            layers=self._layers_done,
        )
        self._server = ServerChannel(
            host=context.host,
            keys=context.keys,
            incarnation=self._incarnation,
            welcome=self._welcome,
        )
        recorder = Recorder(time.monotonic, max_requests=config.trace_requests)
        self._trace = PrefillTrace(recorder)
        self._readers = Readers(
            self._book,
            self._server,
            self._trace,
            incarnation=self._incarnation,
            max_requests=2 * config.router.max_pending_requests,
            free=self._free,
        )
        self._report = WorkerReport(
            "prefill",
            context,
            lifecycle,
            incarnation=self._incarnation,
            server=ReportedServer(self._server.address, engine.max_model_len),
            load=ReportedLoad(self._scheduler, self._blocks),
            cache=ReportedCache(watched.control, self._finish_reset),
            trace=recorder,
        )
        self._report.describe(self._compatibility, transport=self._source.transport)
        self._metrics = self._report.metrics
        self._ticketing = Ticketing(
            self._readers, engine, self._metrics, checksums=config.transfer.checksums
        )
        watched.export(self._metrics.registry, role="prefill")
        self._server.rejects.export(self._metrics.registry)
        self._mover = open_mover(
            watched.tiers,
            partial(HostArena, engine.pool),
            config.cache,
            layout=engine.layout,
            model_fingerprint=engine.spec.fingerprint,
            metrics=(self._metrics.registry, "prefill"),
            on_change=self._steps.wake,
        )
        self._export_transfers()

    async def serve(self) -> None:
        """Serve until ``stop``, the end of a drain, or until a part of the worker fails.

        Raises:
            ConfigError: the storage tier cannot be used.
        """
        await self._mover.check()
        log.info("event=ready address=%s incarnation=%s", self._server.address, self._incarnation)
        await self._lifecycle.run(
            self._work(),
            self._receive(),
            self._steps.run(),
            self._report.run(),
            self._readers.run(),
            self._ranks.watch(),
        )

    def _work(self) -> Work:
        return Work(
            self._incarnation,
            is_idle=lambda: self._readers.num_owners == 0,
            num_steps=lambda: self._steps.num_completed,
            oldest_step_at=self._steps.oldest_submitted_at,
        )

    async def close(self) -> None:
        """Stop everything that this worker has started."""
        self._steps.close(timeout_s=CLOSE_TIMEOUT_S)
        await self._mover.close(timeout_s=CLOSE_TIMEOUT_S)
        self._source.close()
        self._server.close()
        self._report.close()

    # Messages

    def _welcome(self, client: ClientId, hello: Hello) -> Welcome | Refused:
        del client
        if hello.compatibility is None:
            return Refused(reason="prefill workers take decode workers only")
        try:
            check_compatible(reader=hello.compatibility, source=self._compatibility)
        except HandshakeError as error:
            log.warning("event=refused client=%s reason=%s", hello.name, error)
            return Refused(reason=str(error))
        log.info("event=paired reader=%s", hello.name)
        return Welcome(
            worker_id=self._context.worker_id,
            incarnation=self._incarnation,
            pools=self._source.endpoints,
            compatibility=self._compatibility,
        )

    async def _receive(self) -> None:
        while True:
            client, message = await self._server.receive()
            self._take(client, message)

    def _take(self, client: ClientId, message: AnyMessage | ClientLost) -> None:
        match message:
            case Prefill():
                self._prefill(client, message)
            case Renew():
                self._readers.renew(client, message)
            case Reading(active):
                self._source.serve(client, active=active)
            case Released() | Withdraw():
                self._readers.end(client, message)
            case ClientLost():
                self._source.serve(client, active=False)
                self._readers.lose(client)
            case _:
                log.warning("dropped=%s reason=not for prefill", type(message).__name__)

    def _prefill(self, client: ClientId, request: Prefill) -> None:
        if not self._readers.open(client, request):
            return
        owner = (request.request_id, request.attempt)
        if self._lifecycle.drain.is_set():
            self._readers.refuse(owner, "this prefill worker is draining; it takes nothing new")
            return
        try:
            self._readers.check_load(client)
            self._engine.spec.check_tokens((*request.prompt_token_ids, *request.output_token_ids))
            self._scheduler.add(request)
        except (RequestError, OverloadedError) as error:
            self._readers.refuse(owner, str(error))
            return
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        self._trace.received(owner, num_tokens=num_tokens, first_token=request.first_token)
        self._mover.carry_out()
        self._steps.wake()

    def _free(self, owner: Owner) -> None:
        """Give up ``owner``, wherever it is: queued, computing or leased."""
        if not self._scheduler.cancel(owner):
            self._blocks.release(owner)
        self._lifecycle.changed()
        self._mover.carry_out()
        self._steps.wake()

    async def _finish_reset(self, timeout_s: float) -> None:
        """What the cache had is free; what the tiers must do is begun now, not by some request."""
        self._mover.carry_out()
        self._steps.wake()
        await self._mover.wait_marked(timeout_s=timeout_s)

    # Steps

    def _schedule(self) -> StepBatch | None:
        batch = self._scheduler.schedule()
        if batch is not None and batch.openings:
            self._trace.admitted(self._scheduler.step_parts(batch.step))
        self._mover.carry_out()
        return batch

    def _complete(self, batch: StepBatch, output: StepOutput) -> None:
        self._metrics.observe_step(
            duration_s=output.duration_s,
            num_tokens=batch.num_tokens,
            num_sequences=len(batch.sequences),
        )
        self._trace.step(self._scheduler.step_parts(batch.step), output.duration_s)
        for offer in self._scheduler.complete(output):
            self._ticketing.issue(offer)
        self._mover.carry_out()

    def _layers_done(self, batch: StepBatch, mark: int) -> None:
        for offer in self._scheduler.layers_done(batch.step, mark):
            self._ticketing.issue(offer)

    def _export_transfers(self) -> None:
        registry = self._metrics.registry
        transfers = TransferMetrics(
            self._book.stats, registry, role="prefill", transport=self._source.transport
        )
        transfers.gauge_by_state(
            "sluice_kv_connections",
            "Decode workers that were taken",
            {"connected": lambda: self._server.num_clients},
        )
        transfers.gauge(
            "sluice_kv_leases", "Requests with tickets out", lambda: self._book.num_leased
        )
        transfers.gauge(
            "sluice_kv_registered_bytes",
            REGISTERED_BYTES,
            lambda: self._engine.pool.registered_nbytes,
        )
