"""What readers may ask for, and that each of their requests is freed once, whatever ends it."""

import asyncio
from dataclasses import dataclass, field

import pytest

from core.channel import ClientId
from core.errors import OverloadedError
from core.ids import Attempt, Incarnation, Owner, RequestId
from core.messages import AnyMessage, PieceId, Prefill, PrefillFailed, Released, Ticket
from core.sampling import SamplingParams
from core.trace import Recorder
from prefill.readers import Readers
from prefill.tracing import PrefillTrace
from transfer.tickets import Offer, TicketBook

LIFE = Incarnation("P")
ONE, TWO = ClientId(b"one"), ClientId(b"two")


@dataclass
class Sent:
    """What was said to readers."""

    messages: list[tuple[ClientId, AnyMessage]] = field(
        default_factory=list[tuple[ClientId, AnyMessage]]
    )

    def send(self, client: ClientId, message: AnyMessage) -> None:
        self.messages.append((client, message))


class Side:
    """Readers of a prefill worker that computes nothing."""

    def __init__(self, *, lease_s: float = 30.0) -> None:
        self.sent = Sent()
        self.freed: list[Owner] = []
        self.one_was_freed = asyncio.Event()
        self.readers = Readers(
            TicketBook(LIFE, lease_s=lease_s),
            self.sent,
            PrefillTrace(Recorder(lambda: 0.0)),
            incarnation=LIFE,
            max_requests=2,
            free=self._free,
        )

    def _free(self, owner: Owner) -> None:
        self.freed.append(owner)
        self.one_was_freed.set()

    def ask(self, client: ClientId, name: str) -> Owner:
        owner = (RequestId(name), Attempt(1))
        request = Prefill(
            request_id=owner[0],
            attempt=owner[1],
            prompt_token_ids=(1, 2),
            sampling=SamplingParams(seed=1, max_tokens=1),
            first_token=0,
        )
        assert self.readers.open(client, request)
        self.readers.check_load(client)
        return owner

    def offer(self, owner: Owner) -> None:
        piece = PieceId(first_layer=0, last_layer=0, chunk=0)
        assert self.readers.offer(owner, Offer(piece=piece, blocks=(), num_tokens=2))


async def test_a_reader_is_refused_one_more_than_its_limit_and_others_are_not() -> None:
    side = Side()
    for name in ("a", "b"):
        side.ask(ONE, name)
    with pytest.raises(OverloadedError, match=r"2 requests here already.*max_pending_requests=1"):
        side.ask(ONE, "c")
    side.readers.refuse((RequestId("c"), Attempt(1)), "too many")
    ((client, answer),) = side.sent.messages
    assert client == ONE
    assert isinstance(answer, PrefillFailed)
    side.ask(TWO, "d")
    assert side.freed == []


async def test_a_refused_request_makes_room_for_no_other() -> None:
    side = Side()
    side.ask(ONE, "a")
    side.ask(ONE, "b")
    for name in ("c", "d"):
        with pytest.raises(OverloadedError):
            side.ask(ONE, name)
        side.readers.refuse((RequestId(name), Attempt(1)), "too many")


async def test_what_a_reader_has_released_is_freed_once() -> None:
    side = Side()
    owner = side.ask(ONE, "a")
    side.offer(owner)
    for _ in range(2):
        side.readers.end(ONE, Released(*owner, LIFE))
    assert side.freed == [owner]


async def test_of_a_lost_reader_only_what_has_no_ticket_is_freed() -> None:
    side = Side()
    leased, queued = side.ask(ONE, "leased"), side.ask(ONE, "queued")
    side.offer(leased)
    side.readers.lose(ONE)
    assert side.freed == [queued]


async def test_a_lease_that_nobody_renews_frees_although_nothing_else_happens() -> None:
    side = Side(lease_s=0.01)
    running = asyncio.create_task(side.readers.run())
    await asyncio.sleep(0)  # it waits, with no lease
    owner = side.ask(ONE, "a")
    side.offer(owner)
    assert [type(message) for _, message in side.sent.messages] == [Ticket]
    await side.one_was_freed.wait()
    assert side.freed == [owner]
    running.cancel()
