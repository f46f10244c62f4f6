"""Peers of real workers that hold the right keys, and say what the test wants."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from core.channel import ClientChannel, ClientId, ClientLost, ServerChannel
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
    Renew,
    Renewed,
    Ticket,
    Welcome,
    Withdraw,
)
from core.sampling import SamplingParams
from tests.integration.models import VOCAB_SIZE
from tests.integration.requests import prompt_of
from tests.integration.stack import HOST, Stack

NUM_TOKENS = 6
SEEDS = itertools.count(50)
"""Prompts that no cache knows: what is known is not asked of prefill."""
GREEDY = SamplingParams(seed=1, max_tokens=NUM_TOKENS, temperature=0.0)


def address_of(stack: Stack, name: str) -> str:
    return stack.worker(name)["address"]


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
        piece=PieceId(first_layer=0, last_layer=3, chunk=0),
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
        ticket_for(side, request, piece=PieceId(0, 3, 2**20 - 1), blocks=())
    ],
    "other layers": lambda side, request: [ticket_for(side, request, piece=PieceId(3, 200, 0))],
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
