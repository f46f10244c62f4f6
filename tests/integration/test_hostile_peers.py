"""A peer with a good key that lies: it may cost its own requests, and nobody else's.

A key can be stolen, and a worker can go mad. The test holds the deployment's keys, and speaks to
its real workers as one of them: whatever it says, they go on serving right answers, as the same
processes, and all of their blocks come back.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.channel import ClientChannel, ClientId, ClientLost, ServerChannel
from core.errors import PeerLostError
from core.ids import Attempt, BlockId, Generation, Incarnation, Owner, RequestId, WorkerId
from core.messages import (
    AnyMessage,
    Failed,
    FirstToken,
    Generate,
    GroupBlocks,
    Hello,
    OutputBatch,
    PieceId,
    PoolEndpoint,
    Prefill,
    PrefillFailed,
    PrefillPeer,
    Released,
    Renew,
    Renewed,
    Ticket,
    Welcome,
    Withdraw,
)
from core.sampling import SamplingParams
from tests.core.message_strategies import messages
from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import complete_all, generate_reference, prompt_of
from tests.integration.stack import HOST, Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(400)]

NUM_TOKENS = 6
SEEDS = itertools.count(50)
"""Prompts that no cache knows: what is known is not asked of prefill."""
GREEDY = SamplingParams(seed=1, max_tokens=NUM_TOKENS, temperature=0.0)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def stack(model_path: Path) -> Iterator[Stack]:
    with Stack.open(
        model_path,
        model={"dtype": "float32"},
        cache={"memory_gib": 0.05, "poison": True},
        transfer={
            "lease_s": 2.0,
            "renew_interval_s": 0.5,
            "read_timeout_s": 2.0,
            "prefill_timeout_s": 3.0,
        },
    ) as stack:
        yield stack


def address_of(stack: Stack, name: str) -> str:
    (address,) = [w["address"] for w in stack.workers() if w["worker_id"] == name]
    return address


def incarnations(stack: Stack) -> set[str]:
    return {worker["incarnation"] for worker in stack.workers()}


@pytest.fixture(scope="module")
def right_answers(model_path: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts, each with what the model says."""
    prompts = [prompt_of(90 + 5 * n, VOCAB_SIZE, seed=500 + n) for n in range(32)]
    answers = generate_reference(model_path, prompts, num_tokens=NUM_TOKENS)
    return list(zip(prompts, answers, strict=True))


@pytest.fixture(autouse=True)
def _still_serves(stack: Stack, right_answers: list[tuple[list[int], list[int]]]) -> Iterator[None]:
    """After each test the same processes give right answers, and hold nothing."""
    before = incarnations(stack)
    yield
    prompts = [prompt for prompt, _ in right_answers[:2]]
    answers = asyncio.run(
        complete_all(
            stack.url, prompts, max_tokens=NUM_TOKENS, ignore_eos=True, return_token_ids=True
        )
    )
    token_ids = [answer["choices"][0]["token_ids"] for answer in answers]
    assert token_ids == [answer for _, answer in right_answers[:2]]
    assert incarnations(stack) == before
    for worker in ("prefill-0", "decode-0"):
        stack.wait_idle(worker)


# As a decode worker, to prefill


async def handshake_of(stack: Stack) -> Hello:
    """Return the Hello that the real decode worker says: it is told to a prefill worker of ours."""
    async with liar(stack, lambda _side, _client, _request: []) as side:
        seed = next(SEEDS)
        await ask(stack, side, prompt_of(100, VOCAB_SIZE, seed=seed))
        return side.hello


def reader_channel(stack: Stack, hello: Hello, name: str) -> ClientChannel:
    return ClientChannel(
        address_of(stack, "prefill-0"),
        keys=stack.keys.of("decode"),
        server="prefill",
        hello=msgspec.structs.replace(hello, name=name, incarnation=Incarnation(name)),
    )


async def all_tickets(channel: ClientChannel) -> None:
    """Wait for the last ticket of what was asked for."""
    while True:
        message = await channel.receive()
        if isinstance(message, Ticket) and message.first_token is not None:
            return


async def renewed(channel: ClientChannel, sequence: int, owner: Owner) -> Renewed:
    """Ask whether ``owner`` is still held, and return the answer."""
    channel.send(Renew(sequence=sequence, requests=(owner,)))
    while True:
        message = await channel.receive()
        if isinstance(message, Renewed):
            return message


def prefill_of(name: str, prompt: list[int], **fields: object) -> Prefill:
    return Prefill(RequestId(name), Attempt(1), tuple(prompt), GREEDY, **fields)  # type: ignore[arg-type]


async def test_reader_that_sends_anything_is_lost_or_ignored(stack: Stack) -> None:
    hello = await handshake_of(stack)
    kinds = (Prefill, Renew, Released, Withdraw, Generate, Ticket, Renewed, Hello, OutputBatch)

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.sampled_from(kinds).flatmap(messages), max_size=20))
    def storm(said: list[AnyMessage]) -> None:
        batches.append(said)

    batches: list[list[AnyMessage]] = []
    storm()
    for number, said in enumerate(batches):
        channel = reader_channel(stack, hello, f"liar-{number}")
        await channel.connect()
        for message in said:
            channel.send(message)
        await asyncio.sleep(0.01)
        channel.close()


async def test_reader_cannot_end_or_extend_what_another_has_asked_for(stack: Stack) -> None:
    """D14, D15: a release counts where it comes from the reader, for this life of the source."""
    hello = await handshake_of(stack)
    owner, thief = (reader_channel(stack, hello, name) for name in ("owner", "thief"))
    welcome = await owner.connect()
    await thief.connect()
    # Given a request of one reader whose ticket is out
    owner.send(prefill_of("mine", prompt_of(100, VOCAB_SIZE, seed=next(SEEDS))))
    await all_tickets(owner)
    # When another one releases, withdraws and renews it
    thief.send(Released(RequestId("mine"), Attempt(1), welcome.incarnation))
    thief.send(Withdraw(RequestId("mine"), Attempt(1)))
    mine = (RequestId("mine"), Attempt(1))
    # Then it is void to that one, and held for its reader
    assert (await renewed(thief, 1, mine)).void == (mine,)
    assert (await renewed(owner, 1, mine)).requests == (mine,)
    # And a release for another life of the source frees nothing, one for this life does
    owner.send(Released(*mine, Incarnation("before")))
    assert (await renewed(owner, 2, mine)).requests == (mine,)
    owner.send(Released(*mine, welcome.incarnation))
    assert (await renewed(owner, 3, mine)).void == (mine,)
    for channel in (owner, thief):
        channel.close()


async def test_d14_a_consumed_request_that_is_asked_for_again_gets_no_ticket(stack: Stack) -> None:
    hello = await handshake_of(stack)
    channel = reader_channel(stack, hello, "again")
    welcome = await channel.connect()
    request = prefill_of("once", prompt_of(100, VOCAB_SIZE, seed=next(SEEDS)))
    channel.send(request)
    await all_tickets(channel)
    channel.send(Released(request.request_id, request.attempt, welcome.incarnation))
    # When it is asked for again, on this channel and on another
    other = reader_channel(stack, hello, "other")
    await other.connect()
    channel.send(request)
    other.send(request)
    # Then nothing comes of it but the answers to what was asked behind it
    for number, asking in enumerate((channel, other), start=1):
        owner = (request.request_id, request.attempt)
        asking.send(Renew(sequence=number, requests=(owner,)))
        answer = await asking.receive()
        assert isinstance(answer, Renewed)
        assert answer.void == (owner,)
        asking.close()


async def test_h09_reader_of_another_version_or_layout_learns_no_address(stack: Stack) -> None:
    hello = await handshake_of(stack)
    assert hello.compatibility is not None
    layout = hello.compatibility.kv_layout
    for change in (
        {"protocol_version": hello.protocol_version + 1},
        {"compatibility": msgspec.structs.replace(hello.compatibility, features=("lease",))},
        {"compatibility": msgspec.structs.replace(hello.compatibility, model_fingerprint="x")},
        {"compatibility": None},
        {
            "compatibility": msgspec.structs.replace(
                hello.compatibility, kv_layout=msgspec.structs.replace(layout, num_kv_heads=7)
            )
        },
    ):
        told: list[AnyMessage] = []
        channel = reader_channel(stack, msgspec.structs.replace(hello, **change), "odd")
        told.append(await channel._say_hello())
        assert [type(message).__name__ for message in told] == ["Refused"], change
        channel.close()


# As a prefill worker, to decode

Lie = Callable[["LyingPrefill", ClientId, Prefill], list[AnyMessage]]


class LyingPrefill:
    """A prefill worker that answers each request with what the test says."""

    def __init__(self, stack: Stack, lie: Lie) -> None:
        self.pools: tuple[PoolEndpoint, ...] = ()
        self.incarnation = Incarnation(f"liar-{next(SEEDS)}")
        self.hello = Hello(name="none yet", incarnation=Incarnation("none"))
        self._lie = lie
        self.server = ServerChannel(
            host=HOST,
            keys=stack.keys.of("prefill"),
            incarnation=self.incarnation,
            welcome=self._welcome,
        )

    @property
    def peer(self) -> PrefillPeer:
        return PrefillPeer(WorkerId("liar"), self.incarnation, self.server.address)

    def _welcome(self, _client: ClientId, hello: Hello) -> Welcome:
        self.hello = hello
        pools = self.pools or (PoolEndpoint("ucx", b"of no transport", 4096, 2**40),)
        return Welcome(WorkerId("liar"), self.incarnation, pools, hello.compatibility)

    async def serve(self) -> None:
        while True:
            client, message = await self.server.receive()
            if isinstance(message, Prefill):
                for answer in self._lie(self, client, message):
                    self.server.send(client, answer)
            elif isinstance(message, ClientLost):
                continue


@asynccontextmanager
async def liar(stack: Stack, lie: Lie) -> AsyncIterator[LyingPrefill]:
    side = LyingPrefill(stack, lie)
    serving = asyncio.create_task(side.serve())
    yield side
    serving.cancel()
    side.server.close()
    # pyzmq's authenticator stops watching its descriptor a turn of the loop after it has closed it:
    # a socket made before that may have got the same number, and would never wake up.
    await asyncio.sleep(0.01)


async def pools_of(stack: Stack) -> tuple[PoolEndpoint, ...]:
    """Return where the real prefill worker's memory is: there, reads end in something."""
    hello = await handshake_of(stack)
    channel = reader_channel(stack, hello, "asks")
    welcome = await channel.connect()
    channel.close()
    return welcome.pools


async def ask(stack: Stack, side: LyingPrefill, prompt: list[int]) -> list[int]:
    """Have the real decode worker generate, with ``side`` for its prefill worker."""
    channel = ClientChannel(
        address_of(stack, "decode-0"),
        keys=stack.keys.of("router"),
        server="decode",
        hello=Hello(name="router", incarnation=Incarnation("test")),
    )
    await channel.connect()
    request_id = RequestId(f"lied-to-{id(channel)}")
    channel.send(Generate(request_id, Attempt(1), tuple(prompt), GREEDY, prefill=side.peer))
    token_ids: list[int] = []
    try:
        async with asyncio.timeout(60):
            while True:
                message = await channel.receive()
                assert not isinstance(message, Failed), message
                assert isinstance(message, OutputBatch)
                for output in message.outputs:
                    token_ids += output.token_ids
                    if output.finish_reason is not None:
                        return token_ids
    finally:
        channel.close()


def ticket_for(side: LyingPrefill, request: Prefill, **fields: object) -> Ticket:
    """Return the ticket that would be right if there were any KV."""
    num_tokens = len(request.prompt_token_ids)
    first, end = request.first_token // 16, -(-num_tokens // 16)
    ids = tuple(BlockId(block) for block in range(end - first))
    right = Ticket(
        request_id=request.request_id,
        attempt=request.attempt,
        incarnation=side.incarnation,
        piece=PieceId(rank=0, first_layer=0, last_layer=3, chunk=0),
        blocks=(GroupBlocks(0, first, ids, tuple(Generation(1) for _ in ids)),),
        num_tokens=num_tokens,
        lease_s=10.0,
        last=True,
        first_token=FirstToken(7),
    )
    return msgspec.structs.replace(right, **fields)


def _far_blocks(side: LyingPrefill, request: Prefill) -> list[AnyMessage]:
    ticket = ticket_for(side, request)
    (run,) = ticket.blocks
    far = tuple(BlockId(2**31 - 1) for _ in run.block_ids)
    run = msgspec.structs.replace(run, block_ids=far)
    return [msgspec.structs.replace(ticket, blocks=(run,))]


LIES: dict[str, Callable[[LyingPrefill, Prefill], list[AnyMessage]]] = {
    "nothing": lambda _side, _request: [],
    "blocks out of the pool": _far_blocks,
    "no blocks": lambda side, request: [ticket_for(side, request, blocks=())],
    "a token that does not exist": lambda side, request: [
        ticket_for(side, request, blocks=(), first_token=FirstToken(2**31 - 1))
    ],
    "endless chunks": lambda side, request: [
        ticket_for(side, request, piece=PieceId(0, 0, 3, 2**20 - 1), blocks=())
    ],
    "other layers": lambda side, request: [ticket_for(side, request, piece=PieceId(0, 3, 200, 0))],
    "failed": lambda side, request: [
        PrefillFailed(request.request_id, request.attempt, side.incarnation, "x" * 200_000)
    ],
    "void": lambda side, request: [
        ticket_for(side, request, lease_s=0.0),
        Renewed(0, side.incarnation, (), ((request.request_id, request.attempt),), 0.0),
    ],
    "of a decode worker": lambda side, request: [
        Withdraw(request.request_id, request.attempt),
        ticket_for(side, request, attempt=2, blocks=()),
    ],
}


@pytest.mark.parametrize("what", LIES)
async def test_c23_whatever_prefill_says_the_answer_is_right(
    stack: Stack, right_answers: list[tuple[list[int], list[int]]], what: str
) -> None:
    prompt, expected = right_answers[2 + list(LIES).index(what)]
    async with liar(stack, lambda side, _client, request: LIES[what](side, request)) as side:
        side.pools = await pools_of(stack)
        token_ids = await ask(stack, side, prompt)
    assert token_ids == expected


async def test_c23_prefill_that_says_anything_costs_no_answer(
    stack: Stack, right_answers: list[tuple[list[int], list[int]]]
) -> None:
    said: list[list[AnyMessage]] = []

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.sampled_from((Ticket, Renewed, PrefillFailed)).flatmap(messages)))
    def collect(batch: list[AnyMessage]) -> None:
        said.append(batch)

    collect()

    def lie(side: LyingPrefill, _client: ClientId, request: Prefill) -> list[AnyMessage]:
        """Random messages, in the name of this request and source where they have such."""
        names = {
            "request_id": request.request_id,
            "attempt": request.attempt,
            "incarnation": side.incarnation,
        }
        return [
            msgspec.structs.replace(
                message,
                **{name: names[name] for name in message.__struct_fields__ if name in names},
            )
            for message in said.pop()
        ] + [PrefillFailed(request.request_id, request.attempt, side.incarnation, "enough")]

    async with liar(stack, lie) as side:
        side.pools = await pools_of(stack)
        for prompt, expected in right_answers[-12:]:
            assert await ask(stack, side, prompt) == expected


# As a router, to decode


async def test_router_that_asks_for_anything_gets_an_answer_or_is_lost(stack: Stack) -> None:
    batches: list[list[Generate]] = []

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(messages(Generate), max_size=8))
    def collect(batch: list[Generate]) -> None:
        batches.append(batch)

    collect()
    for number, batch in enumerate(batches):
        channel = ClientChannel(
            address_of(stack, "decode-0"),
            keys=stack.keys.of("router"),
            server="decode",
            hello=Hello(name="router", incarnation=Incarnation(f"r{number}")),
        )
        await channel.connect()
        for message in batch:
            channel.send(msgspec.structs.replace(message, prefill=None))
        try:
            async with asyncio.timeout(0.05):
                while True:
                    await channel.receive()
        except (TimeoutError, PeerLostError):
            channel.close()
