"""A decode worker: one event loop that owns all state, one engine thread that sees batches only."""

import asyncio
import logging
import time
from functools import partial

from blockmgr.fences import KVWriters
from blockmgr.worker_blocks import WorkerBlocks
from core.channel import ClientId, ClientLost, ServerChannel
from core.errors import OverloadedError, RequestError
from core.ids import BlockId, Incarnation, Owner, StepSeq, new_incarnation
from core.messages import (
    Abort,
    AnyMessage,
    Failed,
    Generate,
    Hello,
    Peers,
    Refused,
    Welcome,
)
from core.tasks import run_until
from core.trace import Recorder
from core.worker_context import WorkerContext
from core.worker_report import ReportedCache, ReportedLoad, WorkerReport
from decode.load_failure import LoadFailures
from decode.receiver import Delivery, Loss, Memory, Receiver
from decode.scheduler import DecodeScheduler
from decode.sequence import Progress, Sequence
from decode.serving import Outbox, Served
from decode.sources import Sources
from decode.tracing import DecodeTrace
from engine.batch import StepBatch, StepOutput
from engine.host_arena import HostArena
from engine.step_loop import StepLoop
from ranks.leader import Ranks
from transfer.extents import Part
from transfer.reader import Reader
from transfer.tiers.opening import open_mover

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


async def run_decode(context: WorkerContext, stop: asyncio.Event) -> None:
    """Serve as decode worker until ``stop``.

    Raises:
        ConfigError: the model, a size or a port cannot be used.
        InternalError: an invariant broke; the process must end and be started anew.
    """
    incarnation = new_incarnation()
    ranks = await Ranks.start(context, "decode", incarnation=incarnation)
    try:
        worker = DecodeWorker(context, ranks, incarnation)
        try:
            await worker.serve(stop)
        finally:
            await worker.close()
    finally:
        await ranks.close()


class DecodeWorker:
    """The only place on decode where tokens, blocks and transfers meet; it decides nothing."""

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
        self._served: dict[Owner, Served] = {}
        self._num_preemptions_seen = 0
        self._steps = StepLoop(
            engine.runner,
            depth=config.scheduler.overlap_depth,
            schedule=self._schedule,
            complete=self._complete,
            fail=self._fail_step,
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
            incarnation=self._incarnation,
            address=self._server.address,
            max_model_len=engine.max_model_len,
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
        self._load_failures = LoadFailures(config.transfer.load_failure, self._metrics.registry)
        self._mover = open_mover(
            watched.tiers,
            partial(HostArena, engine.pool),
            config.cache,
            layout=engine.layout,
            model_fingerprint=engine.spec.fingerprint,
            metrics=(self._metrics.registry, "decode"),
            on_change=self.memory_changed,
        )
        self._receiver = self._make_receiver() if config.deploy.prefill else None
        transport = "none" if self._receiver is None else self._receiver.transport
        self._report.describe(engine.compatibility, transport=transport)

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` or until a part of the worker fails.

        Raises:
            ConfigError: the storage tier cannot be used.
        """
        await self._mover.check()
        log.info("event=ready address=%s incarnation=%s", self._server.address, self._incarnation)
        parts = [self._receive(), self._steps.run(), self._report.run(), self._ranks.watch()]
        if self._receiver is not None:
            parts.append(self._receiver.run())
        await run_until(stop, *parts)

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
            case Generate():
                self._generate(client, message)
            case Peers():
                if self._receiver is not None:
                    self._receiver.announced(client, message)
            case Abort():
                self._abort((message.request_id, message.attempt))
            case ClientLost():
                if self._receiver is not None:
                    self._receiver.router_lost(client)
                owners = [owner for owner, s in self._served.items() if s.client == client]
                log.warning("event=client_lost aborted=%d", len(owners))
                for owner in owners:
                    self._abort(owner)
            case _:
                log.warning("dropped=%s reason=not for decode", type(message).__name__)

    def _generate(self, client: ClientId, request: Generate) -> None:
        owner = (request.request_id, request.attempt)
        older = [o for o in self._served if o[0] == request.request_id]
        if any(attempt >= request.attempt for _, attempt in older):
            log.warning("dropped=Generate request=%s reason=stale attempt", request.request_id)
            return
        for stale in older:
            self._abort(stale)
        sequence = Sequence(
            owner=owner,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            output_token_ids=list(request.output_token_ids),
        )
        served = Served(client=client, sequence=sequence, arrived_at=self._clock())
        prefill = request.prefill if self._is_worth_a_transfer(sequence) else None
        try:
            self._check_load(client)
            self._check_tokens(request)
            self._scheduler.add(sequence, remote=prefill is not None)
        except RequestError as error:
            self._fail(served, Loss(owner, str(error), "request", field=error.field))
            return
        except OverloadedError as error:
            self._fail(served, Loss(owner, str(error), "capacity"))
            return
        self._trace.received(sequence)
        self._served[owner] = served
        if prefill is not None and self._receiver is not None:
            served.path = "disaggregated"
            self._receiver.request(sequence, prefill)
        self._mover.carry_out()
        self._steps.wake()

    def _check_load(self, client: ClientId) -> None:
        """A router has asked for no more than it lets its clients ask for."""
        limit = self._context.config.router.max_pending_requests
        if sum(served.client == client for served in self._served.values()) > limit:
            raise OverloadedError(f"router.max_pending_requests={limit} are here already")

    def _check_tokens(self, request: Generate) -> None:
        spec = self._engine.spec
        if not spec.has_tokens((*request.prompt_token_ids, *request.output_token_ids)):
            raise RequestError(
                f"prompt has token ids outside of 0 to {spec.vocab_size - 1}; is the router's "
                "tokenizer that of this model?",
                field="prompt",
            )

    def _is_worth_a_transfer(self, sequence: Sequence) -> bool:
        if self._receiver is None:
            return False
        num_uncached = self._scheduler.num_uncached_tokens(sequence)
        return num_uncached > self._context.config.router.local_prefill_max_tokens

    def _abort(self, owner: Owner) -> None:
        """Nobody wants the rest of ``owner``. Unknown owners have ended already."""
        if self._served.pop(owner, None) is not None:
            self._trace.aborted(owner)
            if self._scheduler.abort(owner) and self._receiver is not None:
                self._receiver.cancel(owner)
            self.memory_changed()

    # What reads bring

    def memory_changed(self) -> None:
        """See ``ReceiverOwner``: whoever waits for blocks looks again."""
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
        token = delivery.first_token
        if not self._engine.spec.has_tokens((token.token_id,)):
            reason = f"prefill sampled token {token.token_id}, which the model does not have"
            self.lost(Loss(delivery.owner, reason, "transfer"))
            return
        served = self._served[delivery.owner]
        sequence = served.sequence
        served.kv_nbytes = delivery.stats.kv_nbytes
        served.num_tickets = delivery.stats.num_tickets
        served.num_remote_cached_tokens = delivery.stats.num_cached_tokens
        served.prefill_s = delivery.stats.prefill_s
        served.transfer_s = delivery.stats.transfer_s
        served.transport = delivery.transport
        self._metrics.observe_stage("transfer", delivery.stats.transfer_s)
        self._metrics.count_prompt(
            remote=sequence.num_tokens - sequence.num_cached_tokens,
            cached=sequence.num_cached_tokens,
        )
        self._scheduler.deliver(delivery.owner, token.token_id)
        reason = self._scheduler.finish_delivered(delivery.owner)
        outbox = Outbox()
        self._tell(outbox, Progress(sequence, token.token_id, token.logprobs, reason))
        self._send(outbox)
        self.memory_changed()

    def lost(self, loss: Loss) -> None:
        """See ``ReceiverOwner``."""
        served = self._served.get(loss.owner)
        if served is None:
            return
        if self._load_failures.is_recomputed(loss):
            request_id, attempt = loss.owner
            log.warning(
                "event=recompute request=%s attempt=%d reason=%s", request_id, attempt, loss.reason
            )
            self._trace.recomputing(loss.owner, loss.reason)
            served.path = "local"
            self._scheduler.recompute(loss.owner)
        else:
            del self._served[loss.owner]
            self._scheduler.lose_prefill(loss.owner)
            self._fail(served, loss)
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
        outbox = Outbox()
        progress = self._scheduler.complete(output)
        for step_progress in progress:
            self._tell(outbox, step_progress)
        self._metrics.count_generated(len(progress))
        self._send(outbox)
        self._mover.carry_out()
        if self._receiver is not None:
            self._receiver.retry_allocations()

    def _fail_step(self, step: StepSeq) -> None:
        self._scheduler.fail_step(step)

    def _tell(self, outbox: Outbox, progress: Progress) -> None:
        served = self._served[progress.sequence.owner]
        now = self._clock()
        outbox.put(served.client, served.output(progress))
        if served.first_token_at is None:
            served.first_token_at = now
            self._trace.first_token(progress.sequence.owner)
            if served.path == "local":
                served.prefill_s = now - served.arrived_at
                self._metrics.observe_stage("prefill", served.prefill_s)
                cached = progress.sequence.num_cached_tokens
                num_known = progress.sequence.num_tokens - 1  # but for the token just sampled
                self._metrics.count_prompt(computed=num_known - cached, cached=cached)
        if progress.finish_reason is not None:
            self._trace.finished(progress.sequence, progress.finish_reason)
            self._metrics.observe_stage("decode", now - served.first_token_at)
            del self._served[progress.sequence.owner]

    def _send(self, outbox: Outbox) -> None:
        for client, message in outbox.messages():
            self._server.send(client, message)

    def _fail(self, served: Served, loss: Loss) -> None:
        self._trace.failed(loss.owner, loss.kind, loss.reason)
        log.warning(
            "event=failed request=%s attempt=%d kind=%s reason=%s",
            served.request_id,
            served.attempt,
            loss.kind,
            loss.reason,
        )
        self._server.send(
            served.client,
            Failed(
                request_id=served.request_id,
                attempt=served.attempt,
                reason=loss.reason,
                kind=loss.kind,
                peer=loss.peer,
                field=loss.field,
            ),
        )

    def _digests_of(self, block_ids: list[BlockId], part: Part) -> tuple[bytes, ...]:
        pool = self._engine.pool
        return pool.digests(block_ids, offset=part.offset, nbytes=part.nbytes)

    def _make_receiver(self) -> Receiver:
        context, engine = self._context, self._engine
        config = context.config
        limit = int(config.cache.quarantine_fraction * engine.pool.num_blocks)
        self._metrics.gauge(
            "sluice_kv_quarantine_limit_blocks",
            "Blocks that reads without an owner may hold before an endpoint is torn down",
            lambda: limit,
        )
        self._metrics.gauge(
            "sluice_kv_registered_bytes",
            "Bytes of the registered pool",
            lambda: engine.pool.nbytes,
        )
        reader = Reader(layout=engine.layout, config=config.transfer, max_quarantined_blocks=limit)
        hello = Hello(
            name=context.worker_id,
            incarnation=self._incarnation,
            compatibility=engine.compatibility,
        )
        return Receiver(
            reader=reader,
            compatibility=engine.compatibility,
            open_reads=partial(self._ranks.open_reads, reader.stats),
            open_sources=lambda receiver: Sources(context.keys, hello, receiver),
            memory=Memory(self._blocks, self._scheduler, self._digests_of),
            owner=self,
            registry=self._metrics.registry,
            trace=self._trace,
        )
