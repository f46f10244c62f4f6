"""Every live request of every router, from its Generate to the last word about it."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from core.bounds import MAX_EXPLANATION
from core.channel import ClientId
from core.config import SluiceConfig
from core.errors import OverloadedError, RequestError
from core.ids import Owner
from core.messages import AnyMessage, Failed, FirstToken, Generate, PrefillPeer
from core.sampling import SamplingParams
from core.worker_metrics import WorkerMetrics
from decode.delivery import Delivery, Loss
from decode.load_failure import LoadFailures
from decode.scheduler import DecodeScheduler
from decode.sequence import Progress, Sequence
from decode.serving import Outbox, Served
from decode.tracing import DecodeTrace

log = logging.getLogger(__name__)


class Replies(Protocol):
    """Takes what is said to routers."""

    def send(self, client: ClientId, message: AnyMessage) -> None:
        """Send ``message``; nothing is done where ``client`` is lost."""
        ...


class Transfers(Protocol):
    """Brings KV from prefill workers."""

    def request(self, sequence: Sequence, peer: PrefillPeer) -> None:
        """Ask ``peer`` for the KV of ``sequence``."""
        ...

    def cancel(self, owner: Owner) -> None:
        """Nobody wants ``owner`` any more."""
        ...


class Vocabulary(Protocol):
    """Which token ids the model has."""

    def has_tokens(self, token_ids: tuple[int, ...]) -> bool:
        """Whether every id is of the model."""
        ...

    def check_tokens(self, token_ids: tuple[int, ...]) -> None:
        """Raise RequestError if one is not."""
        ...


class Requests:
    """Joins routers, scheduler and transfers. Belongs to one event loop.

    Each request that was taken has one end: its last output, ``Failed``, or an abort. A router
    reaches its own requests only, whatever ids it names.
    """

    def __init__(
        self,
        scheduler: DecodeScheduler,
        transfers: Transfers | None,
        replies: Replies,
        trace: DecodeTrace,
        metrics: WorkerMetrics,
        *,
        config: SluiceConfig,
        vocabulary: Vocabulary,
        memory_changed: Callable[[], None],
    ) -> None:
        """Begin without a request.

        Args:
            scheduler: Has the sequences.
            transfers: None where there is no prefill.
            replies: Leads to the routers.
            trace: Of each request.
            metrics: Of this worker.
            config: What routers may ask for, when a transfer is worth it, and what becomes of a
                request whose KV does not come.
            vocabulary: Of the model.
            memory_changed: Told where an end gave blocks back.
        """
        self._scheduler = scheduler
        self._transfers = transfers
        self._replies = replies
        self._trace = trace
        self._metrics = metrics
        self._config = config.router
        self._load_failures = LoadFailures(config.transfer.load_failure, metrics.registry)
        self._vocabulary = vocabulary
        self._memory_changed = memory_changed
        self._clock = asyncio.get_running_loop().time
        self._served: dict[Owner, Served] = {}

    @property
    def num_live(self) -> int:
        """Requests without their last word."""
        return len(self._served)

    # From routers

    def take(self, client: ClientId, request: Generate) -> bool:
        """Begin what ``client`` asks for; an older attempt ends. Return whether there is work."""
        owner = (request.request_id, request.attempt)
        rival = self._served.get(owner)
        if rival is not None and rival.client != client:
            self._refuse_twin(client, owner)
            return False
        older = [
            o for o, s in self._served.items() if o[0] == request.request_id and s.client == client
        ]
        if any(attempt >= request.attempt for _, attempt in older):
            log.warning("dropped=Generate request=%s attempt=%d reason=stale", *owner)
            return False
        for stale in older:
            self._end(stale)
        served = self._served_of(client, request)
        sequence = served.sequence
        prefill = request.prefill if self._is_worth_a_transfer(sequence) else None
        try:
            self._check_load(client)
            self._vocabulary.check_tokens((*request.prompt_token_ids, *request.output_token_ids))
            self._scheduler.add(sequence, remote=prefill is not None)
        except RequestError as error:
            self._fail(served, Loss(owner, str(error), "request", field=error.field))
            return False
        except OverloadedError as error:
            self._fail(served, Loss(owner, str(error), "capacity"))
            return False
        self._trace.received(sequence)
        self._served[owner] = served
        if prefill is not None and self._transfers is not None:
            served.path = "disaggregated"
            self._transfers.request(sequence, prefill)
        return True

    def refuse(self, client: ClientId, request: Generate) -> None:
        """Tell ``client`` that this worker drains: another one takes ``request``."""
        reason = "this decode worker is draining; it takes no new requests"
        owner = (request.request_id, request.attempt)
        self._fail(self._served_of(client, request), Loss(owner, reason, "draining"))

    def _served_of(self, client: ClientId, request: Generate) -> Served:
        sequence = Sequence(
            owner=(request.request_id, request.attempt),
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            output_token_ids=list(request.output_token_ids),
        )
        return Served(client=client, sequence=sequence, arrived_at=self._clock())

    def _refuse_twin(self, client: ClientId, owner: Owner) -> None:
        """Another router's request has this id and attempt: it goes on, and is not named twice."""
        log.warning("dropped=Generate request=%s attempt=%d reason=another router's", *owner)
        reason = "another router has a request of this id here; give each request an id of its own"
        self._replies.send(client, Failed(*owner, reason=reason, kind="capacity"))

    def abort(self, client: ClientId, owner: Owner) -> None:
        """``client`` wants no more of ``owner``. Unknown owners have ended already."""
        served = self._served.get(owner)
        if served is not None and served.client != client:
            log.warning("dropped=Abort request=%s attempt=%d reason=another router's", *owner)
        elif served is not None:
            self._end(owner)

    def _end(self, owner: Owner) -> None:
        del self._served[owner]
        self._trace.aborted(owner)
        if self._scheduler.abort(owner) and self._transfers is not None:
            self._transfers.cancel(owner)
        self._memory_changed()

    def lose_router(self, client: ClientId) -> None:
        """Nobody is left to tell of what ``client`` has asked for."""
        owners = [owner for owner, served in self._served.items() if served.client == client]
        log.warning("event=client_lost aborted=%d", len(owners))
        for owner in owners:
            self._end(owner)

    def _check_load(self, client: ClientId) -> None:
        """A router has asked for no more than it lets its clients ask for."""
        limit = self._config.max_pending_requests
        count = sum(served.client == client for served in self._served.values())
        if count >= limit:
            raise OverloadedError(
                f"this router has {count} requests here already, "
                f"router.max_pending_requests={limit} are taken; give router and decode one value "
                "of it, or add decode workers"
            )

    def _is_worth_a_transfer(self, sequence: Sequence) -> bool:
        if self._transfers is None:
            return False
        num_uncached = self._scheduler.num_uncached_tokens(sequence)
        return num_uncached > self._config.local_prefill_max_tokens

    # From transfers and steps

    def deliver(self, delivery: Delivery) -> None:
        """All KV of a request is here, and its first token, which its router is told."""
        token = delivery.first_token
        served = self._served[delivery.owner]
        fault = self._fault_of(token, served.sequence.sampling)
        if fault is not None:
            self.lose(Loss(delivery.owner, fault, "transfer"))
            return
        sequence = served.sequence
        served.take(delivery.stats, transport=delivery.transport)
        self._metrics.observe_stage("transfer", delivery.stats.transfer_s)
        self._metrics.count_prompt(
            remote=sequence.num_tokens - sequence.num_cached_tokens,
            cached=sequence.num_cached_tokens,
        )
        self._scheduler.deliver(delivery.owner, token.token_id)
        reason = self._scheduler.finish_delivered(delivery.owner)
        self.tell([Progress(sequence, token.token_id, token.logprobs, reason)])

    def _fault_of(self, token: FirstToken, sampling: SamplingParams) -> str | None:
        """Return why what prefill says of the first token cannot be passed on; None: it can."""
        if not self._vocabulary.has_tokens((token.token_id,)):
            return f"prefill sampled token {token.token_id}, which the model does not have"
        told, asked = token.logprobs, sampling.logprobs
        if (told is None) != (asked is None):
            return f"prefill tells other log-probabilities than logprobs={asked}"
        rivals = () if told is None else tuple([token_id for token_id, _ in told.top])
        if len(rivals) > (asked or 0) or not self._vocabulary.has_tokens(rivals):
            return f"prefill tells {len(rivals)} rivals of the first token, or such as do not exist"
        return None

    def lose(self, loss: Loss) -> None:
        """The KV of a request will not come: it is computed here, or has failed."""
        served = self._served.get(loss.owner)
        if served is None:
            return
        if self._load_failures.is_recomputed(loss):
            request_id, attempt = loss.owner
            log.warning(
                "event=recompute request=%s attempt=%d reason=%s", request_id, attempt, loss.reason
            )
            self._trace.recomputing(loss.owner, loss.reason)
            served.path, served.is_recomputed = "local", True
            self._scheduler.recompute(loss.owner)
        else:
            del self._served[loss.owner]
            self._scheduler.lose_prefill(loss.owner)
            self._fail(served, loss)

    def tell(self, progress: Iterable[Progress]) -> None:
        """Send each router its new tokens, in one message."""
        outbox = Outbox()
        for each in progress:
            self._put(outbox, each)
        for client, message in outbox.messages():
            self._replies.send(client, message)

    def _put(self, outbox: Outbox, progress: Progress) -> None:
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

    def _fail(self, served: Served, loss: Loss) -> None:
        self._trace.failed(loss.owner, loss.kind, loss.reason)
        log.warning(
            "event=failed request=%s attempt=%d kind=%s reason=%s",
            served.request_id,
            served.attempt,
            loss.kind,
            loss.reason,
        )
        self._replies.send(
            served.client,
            Failed(
                request_id=served.request_id,
                attempt=served.attempt,
                reason=loss.reason[:MAX_EXPLANATION],
                kind=loss.kind,
                peer=loss.peer,
                field=loss.field,
            ),
        )
