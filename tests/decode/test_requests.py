"""What a router may ask for, and that each request it asks for has one end."""

from dataclasses import dataclass, field

import pytest

from core.bounds import MAX_EXPLANATION
from core.channel import ClientId
from core.config import SluiceConfig
from core.errors import RequestError
from core.ids import Attempt, Incarnation, RequestId, WorkerId
from core.messages import (
    AnyMessage,
    Failed,
    FirstToken,
    Generate,
    OutputBatch,
    PrefillPeer,
    decode,
    encode,
)
from core.sampling import SamplingParams, TokenLogprobs
from core.trace import Recorder
from core.worker_metrics import WorkerMetrics
from decode.delivery import Delivery, Loss
from decode.requests import Requests
from decode.tracing import DecodeTrace
from tests.decode.bench import Bench
from transfer.actions import ReceiveStats

ONE, TWO = ClientId(b"one"), ClientId(b"two")
PEER = PrefillPeer(WorkerId("P"), Incarnation("P1"), "tcp://127.0.0.1:1")
VOCAB_SIZE = 1000


@dataclass
class Sent:
    """What was said to routers."""

    messages: list[tuple[ClientId, AnyMessage]] = field(
        default_factory=list[tuple[ClientId, AnyMessage]]
    )

    def send(self, client: ClientId, message: AnyMessage) -> None:
        self.messages.append((client, message))

    def failed(self) -> list[tuple[str, int, str]]:
        fails = [message for _, message in self.messages if isinstance(message, Failed)]
        return [(each.request_id, each.attempt, each.kind) for each in fails]


class Words:
    """A vocabulary of ``VOCAB_SIZE``."""

    def has_tokens(self, token_ids: tuple[int, ...]) -> bool:
        return all(0 <= token_id < VOCAB_SIZE for token_id in token_ids)

    def check_tokens(self, token_ids: tuple[int, ...]) -> None:
        if not self.has_tokens(token_ids):
            raise RequestError("prompt has a stray token id", field="prompt")


class Side(Bench):
    """The requests of a decode worker; KV never comes."""

    def __init__(self, *, load_failure: str = "recompute") -> None:
        super().__init__(64)
        self.sent = Sent()
        self.asked: list[str] = []
        self.cancelled: list[str] = []
        self.num_changes = 0
        config = SluiceConfig.model_validate(
            {
                "router": {"max_pending_requests": 2, "local_prefill_max_tokens": 16},
                "transfer": {"load_failure": load_failure},
            }
        )
        self.requests = Requests(
            self.scheduler,
            self,
            self.sent,
            DecodeTrace(Recorder(lambda: 0.0)),
            WorkerMetrics("decode"),
            config=config,
            vocabulary=Words(),
            memory_changed=self._count_change,
        )

    def request(self, sequence: object, peer: PrefillPeer) -> None:
        del sequence
        self.asked.append(peer.worker_id)

    def cancel(self, owner: tuple[RequestId, Attempt]) -> None:
        self.cancelled.append(owner[0])

    def _count_change(self) -> None:
        self.num_changes += 1

    def take(
        self,
        client: ClientId,
        name: str,
        *,
        attempt: int = 1,
        token_ids: tuple[int, ...] = tuple(range(20)),
        prefill: PrefillPeer | None = None,
        logprobs: int | None = None,
    ) -> bool:
        return self.requests.take(
            client,
            Generate(
                request_id=RequestId(name),
                attempt=Attempt(attempt),
                prompt_token_ids=token_ids,
                sampling=SamplingParams(seed=1, max_tokens=1, logprobs=logprobs),
                prefill=prefill,
            ),
        )

    def run(self) -> None:
        while (batch := self.scheduler.schedule()) is not None:
            self.requests.tell(self.complete(batch))


async def test_a_router_gets_no_more_than_its_limit_and_others_are_not_refused() -> None:
    side = Side()
    assert [side.take(ONE, name) for name in ("a", "b", "c")] == [True, True, False]
    ((client, failed),) = side.sent.messages
    assert client == ONE
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.kind) == ("c", "capacity")
    assert "2 requests here already, router.max_pending_requests=2" in failed.reason
    assert side.take(TWO, "d")


async def test_what_has_ended_makes_room_for_the_next() -> None:
    side = Side()
    side.take(ONE, "a")
    side.take(ONE, "b")
    side.run()
    assert side.take(ONE, "c")
    side.requests.abort(ONE, (RequestId("c"), Attempt(1)))
    assert side.take(ONE, "d")
    assert side.take(ONE, "e")


async def test_a_newer_attempt_ends_the_older_one_and_takes_its_place() -> None:
    side = Side()
    side.take(ONE, "a")
    side.take(ONE, "b")
    assert side.take(ONE, "a", attempt=2)
    assert not side.take(ONE, "a", attempt=1), "it is stale"
    assert side.num_changes == 1
    side.run()
    batches = [message for _, message in side.sent.messages if isinstance(message, OutputBatch)]
    outputs = [output for batch in batches for output in batch.outputs]
    assert {(output.request_id, output.attempt) for output in outputs} == {("a", 2), ("b", 1)}


async def test_a_router_ends_no_request_of_another_whatever_id_it_names() -> None:
    side = Side()
    side.take(ONE, "a", prefill=PEER)
    side.requests.abort(TWO, (RequestId("a"), Attempt(1)))
    assert not side.take(TWO, "a"), "the same id and attempt"
    assert side.take(TWO, "a", attempt=2), "a newer attempt of the same id"
    assert side.cancelled == []
    ((client, failed),) = side.sent.messages
    assert isinstance(failed, Failed)
    assert (client, failed.kind) == (TWO, "capacity")
    side.requests.lose(Loss((RequestId("a"), Attempt(1)), "cut off", "transfer", WorkerId("P")))
    side.run()
    ended = {
        (client, output.attempt)
        for client, message in side.sent.messages
        if isinstance(message, OutputBatch)
        for output in message.outputs
    }
    assert ended == {(ONE, 1), (TWO, 2)}
    # And its own it ends
    side.take(ONE, "b", prefill=PEER)
    side.requests.abort(ONE, (RequestId("b"), Attempt(1)))
    assert side.requests.num_live == 0


async def test_a_stray_token_id_fails_its_request_alone() -> None:
    side = Side()
    assert not side.take(ONE, "a", token_ids=(1, VOCAB_SIZE))
    assert side.sent.failed() == [("a", 1, "request")]
    assert side.scheduler.num_waiting == 0


async def test_only_what_is_long_enough_is_asked_of_prefill() -> None:
    side = Side()
    side.take(ONE, "short", token_ids=tuple(range(16)), prefill=PEER)
    assert side.asked == []
    side.take(ONE, "long", prefill=PEER)
    assert side.asked == ["P"]


async def test_a_lost_routers_requests_end_and_their_transfers_are_cancelled() -> None:
    side = Side()
    side.take(ONE, "a", prefill=PEER)
    side.take(ONE, "b")
    side.take(TWO, "c")
    side.requests.lose_router(ONE)
    assert side.cancelled == ["a"]
    assert side.scheduler.num_waiting == 1
    assert side.sent.messages == []


async def test_kv_that_does_not_come_fails_once_where_it_is_not_computed_here() -> None:
    side = Side(load_failure="fail")
    side.take(ONE, "a", prefill=PEER)
    loss = Loss((RequestId("a"), Attempt(1)), "cut off", "transfer", WorkerId("P"))
    for _ in range(2):
        side.requests.lose(loss)
    assert side.sent.failed() == [("a", 1, "transfer")]


async def test_kv_that_does_not_come_is_computed_here() -> None:
    side = Side()
    side.take(ONE, "a", prefill=PEER)
    side.requests.lose(Loss((RequestId("a"), Attempt(1)), "cut off", "transfer", WorkerId("P")))
    side.run()
    assert side.sent.failed() == []
    assert isinstance(side.sent.messages[-1][1], OutputBatch)


async def test_a_reason_of_any_length_is_told_as_far_as_a_message_goes() -> None:
    """What is longer would be unreadable: its router would lose the channel, and all it serves."""
    side = Side(load_failure="fail")
    side.take(ONE, "a", prefill=PEER)
    # Given the longest reason that prefill can give, and what is said before it
    reason = "prefill failed: " + "x" * MAX_EXPLANATION
    side.requests.lose(Loss((RequestId("a"), Attempt(1)), reason, "transfer", WorkerId("P")))
    ((_, message),) = side.sent.messages
    # Then its router can read what it is told
    told = decode(encode(message))
    assert isinstance(told, Failed)
    assert told.reason == reason[:MAX_EXPLANATION]


@pytest.mark.parametrize(
    ("asked", "token"),
    [
        (None, FirstToken(VOCAB_SIZE)),
        (None, FirstToken(7, TokenLogprobs(-1.0))),
        (1, FirstToken(7)),
        (1, FirstToken(7, TokenLogprobs(-1.0, ((7, -1.0), (8, -2.0))))),
        (1, FirstToken(7, TokenLogprobs(-1.0, ((VOCAB_SIZE, -1.0),)))),
    ],
)
async def test_what_prefill_says_of_the_first_token_is_what_was_asked(
    asked: int | None, token: FirstToken
) -> None:
    """It is passed on in one message with what others wait for: none may be too long to be read."""
    side = Side()
    side.take(ONE, "a", prefill=PEER, logprobs=asked)
    stats = ReceiveStats(
        kv_nbytes=0, num_tickets=1, num_cached_tokens=0, prefill_s=0.0, transfer_s=0.0
    )
    side.requests.deliver(Delivery((RequestId("a"), Attempt(1)), token, stats, "ucx"))
    side.run()  # it is computed here
    (batch,) = [message for _, message in side.sent.messages]
    assert isinstance(batch, OutputBatch)
    assert [output.logprobs for output in batch.outputs] == [()], "that of the test's own device"
