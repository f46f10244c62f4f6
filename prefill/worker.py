"""A prefill worker: computes prompts chunk by chunk and offers their KV by tickets."""

import asyncio
import logging
import time
from functools import partial

import msgspec

from blockmgr.fences import KVWriters
from blockmgr.worker_blocks import WorkerBlocks
from core.channel import ClientId, ClientLost, ServerChannel
from core.errors import HandshakeError, OverloadedError, RequestError
from core.ids import Incarnation, Owner, new_incarnation
from core.messages import (
    AnyMessage,
    GroupBlocks,
    Hello,
    PieceId,
    Prefill,
    PrefillFailed,
    Reading,
    Refused,
    Released,
    Renew,
    Welcome,
    Withdraw,
)
from core.tasks import run_until
from core.trace import Recorder
from core.worker_context import WorkerContext
from core.worker_report import ReportedCache, ReportedLoad, WorkerReport
from engine.batch import StepBatch, StepOutput
from engine.host_arena import HostArena
from engine.step_loop import StepLoop
from prefill.offers import SettledChunk
from prefill.scheduler import PrefillScheduler
from prefill.tracing import PrefillTrace
from ranks.leader import Ranks
from transfer.handshake import check_compatible
from transfer.metrics import TransferMetrics
from transfer.tickets import Offer, TicketBook
from transfer.tiers.opening import open_mover

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


async def run_prefill(context: WorkerContext, stop: asyncio.Event) -> None:
    """Serve as prefill worker until ``stop``.

    Raises:
        ConfigError: the model, a size or a port cannot be used.
        InternalError: an invariant broke; the process must end and be started anew.
    """
    incarnation = new_incarnation()
    ranks = await Ranks.start(context, "prefill", incarnation=incarnation)
    try:
        worker = PrefillWorker(context, ranks, incarnation)
        try:
            await worker.serve(stop)
        finally:
            await worker.close()
    finally:
        await ranks.close()


class PrefillWorker:
    """The only place on prefill where tokens, blocks and transfers meet; it decides nothing."""

    def __init__(self, context: WorkerContext, ranks: Ranks, incarnation: Incarnation) -> None:
        config = context.config
        engine = ranks.engine
        self._context = context
        self._ranks = ranks
        self._engine = engine
        self._incarnation = incarnation
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
        self._readers: dict[Owner, ClientId] = {}
        self._reading: set[ClientId] = set()
        self._arrived_at: dict[Owner, float] = {}
        self._source = ranks.open_source()
        self._lease_may_be_new = asyncio.Event()
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
        self._report = WorkerReport(
            "prefill",
            context,
            incarnation=self._incarnation,
            address=self._server.address,
            max_model_len=engine.max_model_len,
            load=ReportedLoad(self._scheduler, self._blocks),
            cache=ReportedCache(watched.control, self._finish_reset),
            trace=recorder,
        )
        self._report.describe(self._compatibility, transport=self._source.transport)
        self._metrics = self._report.metrics
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

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` or until a part of the worker fails.

        Raises:
            ConfigError: the storage tier cannot be used.
        """
        await self._mover.check()
        log.info("event=ready address=%s incarnation=%s", self._server.address, self._incarnation)
        await run_until(
            stop,
            self._receive(),
            self._steps.run(),
            self._report.run(),
            self._expire_leases(),
            self._ranks.watch(),
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
                renewed = self._book.renew(message, self._clock(), reader=client.hex())
                self._server.send(client, renewed)
                self._lease_may_be_new.set()
            case Reading(active):
                self._serve(client, active=active)
            case Released() | Withdraw():
                self._end_by_reader(client, message)
            case ClientLost():
                self._lose_reader(client)
            case _:
                log.warning("dropped=%s reason=not for prefill", type(message).__name__)

    def _serve(self, client: ClientId, *, active: bool) -> None:
        """``client`` says whether it reads, or is lost."""
        (self._reading.add if active else self._reading.discard)(client)
        self._source.serve(client, active=active)

    def _prefill(self, client: ClientId, request: Prefill) -> None:
        owner = (request.request_id, request.attempt)
        if not self._book.open(owner, reader=client.hex()):
            log.warning("dropped=Prefill request=%s attempt=%d reason=stale", *owner)
            return
        try:
            self._check_load(client)
            self._check_tokens(request)
            self._scheduler.add(request)
        except (RequestError, OverloadedError) as error:
            self._book.revoke(owner)
            self._trace.failed(owner, str(error))
            self._refuse(client, owner, str(error))
            return
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        self._trace.received(owner, num_tokens=num_tokens, first_token=request.first_token)
        self._readers[owner] = client
        self._arrived_at[owner] = self._clock()
        self._mover.carry_out()
        self._steps.wake()

    def _check_load(self, client: ClientId) -> None:
        """A reader has asked for no more than routers let it have at once."""
        limit = 2 * self._context.config.router.max_pending_requests
        if sum(reader == client for reader in self._readers.values()) >= limit:
            raise OverloadedError(f"{limit} requests of one decode worker are here already")

    def _check_tokens(self, request: Prefill) -> None:
        spec = self._engine.spec
        if not request.prompt_token_ids:
            raise RequestError("prompt is empty; send at least one token", field="prompt")
        if not spec.has_tokens((*request.prompt_token_ids, *request.output_token_ids)):
            raise RequestError(f"token ids outside of 0 to {spec.vocab_size - 1}", field="prompt")

    def _refuse(self, client: ClientId, owner: Owner, reason: str) -> None:
        self._server.send(
            client,
            PrefillFailed(
                request_id=owner[0],
                attempt=owner[1],
                incarnation=self._incarnation,
                reason=reason,
                retryable=True,
            ),
        )

    def _end_by_reader(self, client: ClientId, message: Released | Withdraw) -> None:
        """The reader has all, or wants no more."""
        if isinstance(message, Withdraw):
            owner, how = self._book.withdraw(message, reader=client.hex()), "withdrawn"
        else:
            owner, how = self._book.released(message, reader=client.hex()), "released"
        if owner is not None:
            self._trace.ended(owner, how)
            self._release(owner)

    def _lose_reader(self, client: ClientId) -> None:
        """What a lost reader was offered nothing of ends now; its leases run to their end.

        It may be cut off and still reading: the lease, not the silence, decides.
        """
        self._serve(client, active=False)
        for owner in self._book.reader_lost(client.hex()):
            self._trace.failed(owner, "the reader was lost before its first ticket")
            self._release(owner)

    def _release(self, owner: Owner) -> None:
        """Give up ``owner``, wherever it is: queued, computing or leased."""
        if not self._scheduler.cancel(owner):
            self._blocks.release(owner)
        del self._readers[owner]
        self._arrived_at.pop(owner, None)
        self._mover.carry_out()
        self._steps.wake()

    async def _expire_leases(self) -> None:
        """Free what nobody renewed, whether or not anything else happens."""
        while True:
            self._lease_may_be_new.clear()
            deadline = self._book.next_deadline()
            wait_s = None if deadline is None else max(0.0, deadline - self._clock())
            try:
                async with asyncio.timeout(wait_s):
                    await self._lease_may_be_new.wait()
            except TimeoutError:
                for owner in self._book.expire(self._clock()):
                    log.warning("event=lease_expired request=%s attempt=%d", *owner)
                    self._trace.ended(owner, "expired")
                    self._release(owner)

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
            self._issue(offer)
        self._mover.carry_out()

    def _layers_done(self, batch: StepBatch, mark: int) -> None:
        for offer in self._scheduler.layers_done(batch.step, mark):
            self._issue(offer)

    def _issue(self, offer: SettledChunk) -> None:
        """Ticket what is complete."""
        owner, now = offer.prompt.owner, self._clock()
        prefill_s = now - self._arrived_at[owner]
        ticket = self._book.issue(
            owner,
            Offer(
                piece=PieceId(
                    rank=0,
                    first_layer=offer.first_layer,
                    last_layer=offer.last_layer,
                    chunk=offer.chunk,
                ),
                blocks=self._with_digests(offer),
                num_tokens=offer.num_tokens,
                last=offer.is_last,
                first_token=offer.first_token,
                num_cached_tokens=offer.prompt.num_cached_tokens,
                prefill_s=prefill_s,
            ),
            now,
        )
        if ticket is None:
            return
        self._trace.offered(ticket)
        self._server.send(self._readers[owner], ticket)
        self._lease_may_be_new.set()
        if offer.first_token is not None:
            cached = offer.prompt.num_cached_tokens
            self._metrics.observe_stage("prefill", prefill_s)
            self._metrics.count_prompt(computed=offer.prompt.num_tokens - cached, cached=cached)
            self._metrics.count_generated(1)

    def _with_digests(self, offer: SettledChunk) -> tuple[GroupBlocks, ...]:
        """Tell the reader what it must find, if that is asked for. These layers are complete."""
        if not self._context.config.transfer.checksums:
            return offer.blocks
        pool, layout = self._engine.pool, self._engine.layout
        offset = offer.first_layer * layout.layer_nbytes
        nbytes = (offer.last_layer + 1) * layout.layer_nbytes - offset
        return tuple(
            msgspec.structs.replace(
                named, digests=pool.digests(named.block_ids, offset=offset, nbytes=nbytes)
            )
            for named in offer.blocks
        )

    def _export_transfers(self) -> None:
        registry = self._metrics.registry
        transfers = TransferMetrics(
            self._book.stats, registry, role="prefill", transport=self._source.transport
        )
        transfers.in_flight(lambda: len(self._reading))
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
            "Bytes of the registered pool",
            lambda: self._engine.pool.nbytes,
        )
