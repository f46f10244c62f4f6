"""Who asked for a sequence, and what is told about how it was served."""

from dataclasses import dataclass, field

from core.channel import ClientId
from core.ids import Attempt, RequestId
from core.messages import Output, OutputBatch, RequestStats
from decode.sequence import Progress, Sequence
from transfer.actions import ReceiveStats


@dataclass(slots=True)
class Served:
    """One live request of one router."""

    client: ClientId
    sequence: Sequence
    arrived_at: float
    """Seconds of the event loop's clock."""
    path: str = "local"
    kv_nbytes: int = 0
    num_tickets: int = 0
    num_remote_cached_tokens: int = 0
    transport: str = ""
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    is_recomputed: bool = False
    first_token_at: float | None = None

    @property
    def request_id(self) -> RequestId:
        """Of the request."""
        return self.sequence.owner[0]

    @property
    def attempt(self) -> Attempt:
        """Of the request."""
        return self.sequence.owner[1]

    def take(self, received: ReceiveStats, *, transport: str) -> None:
        """Remember how the KV came, by ``transport``."""
        self.kv_nbytes = received.kv_nbytes
        self.num_tickets = received.num_tickets
        self.num_remote_cached_tokens = received.num_cached_tokens
        self.prefill_s = received.prefill_s
        self.transfer_s = received.transfer_s
        self.transport = transport

    def stats(self) -> RequestStats:
        """Return how the request was served so far."""
        return RequestStats(
            path="disaggregated" if self.path == "disaggregated" else "local",
            num_cached_tokens=max(self.sequence.num_cached_tokens, self.num_remote_cached_tokens),
            kv_nbytes=self.kv_nbytes,
            num_tickets=self.num_tickets,
            transport=self.transport,
            prefill_s=self.prefill_s,
            transfer_s=self.transfer_s,
            num_preemptions=self.sequence.num_preemptions,
            recomputed=self.is_recomputed,
        )

    def output(self, progress: Progress) -> Output:
        """Return the message part for one new token; stats come with the first and the last."""
        is_edge = self.first_token_at is None or progress.finish_reason is not None
        return Output(
            request_id=self.request_id,
            attempt=self.attempt,
            token_ids=(progress.token_id,),
            logprobs=() if progress.logprobs is None else (progress.logprobs,),
            finish_reason=progress.finish_reason,
            stats=self.stats() if is_edge else None,
        )


@dataclass(slots=True)
class Outbox:
    """Outputs of one step by client: one message each."""

    outputs_by_client: dict[ClientId, list[Output]] = field(
        default_factory=dict[ClientId, list[Output]]
    )

    def put(self, client: ClientId, output: Output) -> None:
        """Add ``output`` to the client's message."""
        self.outputs_by_client.setdefault(client, []).append(output)

    def messages(self) -> list[tuple[ClientId, OutputBatch]]:
        """Return one message per client."""
        return [(c, OutputBatch(outputs=tuple(o))) for c, o in self.outputs_by_client.items()]
