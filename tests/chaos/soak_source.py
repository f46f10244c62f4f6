"""A source for the soak: it computes nothing, and else does what a prefill worker does.

Real books, block manager, channel and transport, in a process of its own that can be killed.
"""

import asyncio
import contextlib
import random
from dataclasses import dataclass
from multiprocessing.connection import Connection

from blockmgr.fences import KVWriters
from blockmgr.states import BlockState
from blockmgr.worker_blocks import WorkerBlocks
from core.channel import ClientId, ClientLost, DeploymentKeys, ServerChannel
from core.errors import OutOfBlocksError
from core.ids import BlockId, Incarnation, Owner, WorkerId
from core.messages import (
    AnyMessage,
    FirstToken,
    GroupBlocks,
    Hello,
    PieceId,
    Prefill,
    PrefillFailed,
    Reading,
    Released,
    Renew,
    Welcome,
    Withdraw,
)
from tests.chaos.small_pool import COMPATIBILITY, CONFIG, LAYOUT, SmallPool, content
from transfer.pump import Pump
from transfer.tickets import Offer, TicketBook
from transfer.transports import open_transport

NUM_BLOCKS = 256
HOME_S = 60.0
LAST_LAYER = LAYOUT.layers_per_group - 1


@dataclass(frozen=True)
class SourceSpec:
    """What a source process is told."""

    incarnation: Incarnation
    keys: DeploymentKeys
    ucx_options: dict[str, str]
    keeps_leases: bool
    """False: blocks are free as soon as their tickets are sent, which a reader must notice."""


def run_source(spec: SourceSpec, parent: Connection) -> None:
    """Serve until ``parent`` says something; answer with the blocks by state once all are home.

    Leases whose end was lost run out before; what is not home by ``HOME_S`` is told as it is.
    """
    asyncio.run(_serve(spec, parent))


async def _serve(spec: SourceSpec, parent: Connection) -> None:
    source = SoakSource(spec)
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(parent.fileno(), asked.set)
    parent.send(source.server.address)
    tasks = [asyncio.create_task(source.receive()), asyncio.create_task(source.expire())]
    done, _ = await asyncio.wait(
        [*tasks, asyncio.create_task(asked.wait())], return_when=asyncio.FIRST_COMPLETED
    )
    for task in done:
        task.result()
    parent.recv()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HOME_S):
            while not source.is_home:  # noqa: ASYNC110 - seen from outside
                await asyncio.sleep(0.05)
    source.blocks.check_invariants()
    parent.send({state.name: count for state, count in source.blocks.counts().items() if count})
    source.close()


class SoakSource:
    def __init__(self, spec: SourceSpec) -> None:
        incarnation = self._incarnation = spec.incarnation
        self._keeps_leases = spec.keeps_leases
        self._clock = asyncio.get_running_loop().time
        self._random = random.Random(int(incarnation, 16))
        self._pool = SmallPool(NUM_BLOCKS)
        self._transport = open_transport("auto", incarnation, ucx_options=spec.ucx_options)
        self._transport.register(self._pool.address, self._pool.nbytes)
        self._pump = Pump(self._transport, interval_s=CONFIG.transfer.pump_interval_s)
        self.blocks = WorkerBlocks.make(
            LAYOUT,
            self._pool,
            CONFIG,
            incarnation=incarnation,
            writers=KVWriters.PRODUCER,
            clock=self._clock,
        ).manager
        self._book = TicketBook(incarnation, lease_s=CONFIG.transfer.lease_s)
        self.server = ServerChannel(
            host="127.0.0.1",
            keys=spec.keys.of("prefill"),
            incarnation=incarnation,
            welcome=self._welcome,
        )

    @property
    def is_home(self) -> bool:
        """Whether all blocks are free."""
        return self.blocks.counts()[BlockState.FREE] == NUM_BLOCKS

    def close(self) -> None:
        self._pump.close()
        self._transport.close()
        self.server.close()

    def _welcome(self, client: ClientId, hello: Hello) -> Welcome:
        del client, hello
        return Welcome(
            WorkerId("source"), self._incarnation, (self._transport.endpoint(),), COMPATIBILITY
        )

    async def receive(self) -> None:
        while True:
            client, message = await self.server.receive()
            self._take(client, message)

    async def expire(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for owner in self._book.expire(self._clock()):
                self._free(owner)

    def _take(self, client: ClientId, message: AnyMessage | ClientLost) -> None:
        match message:
            case Prefill():
                self._prefill(client, message)
            case Renew():
                self.server.send(client, self._book.renew(message, self._clock()))
            case Reading(active):
                self._pump.serve(client, active=active)
            case Released():
                self._free(self._book.released(message))
            case Withdraw():
                self._free(self._book.withdraw(message))
            case ClientLost():
                self._pump.serve(client, active=False)
            case _:
                raise AssertionError(message)

    def _free(self, owner: Owner | None) -> None:
        if owner is not None and self._keeps_leases:
            self.blocks.release(owner)

    def _prefill(self, client: ClientId, request: Prefill) -> None:
        owner = (request.request_id, request.attempt)
        if not self._book.open(owner, reader=client.hex()):
            return
        num_tokens = len(request.prompt_token_ids)
        try:
            self.blocks.admit(owner, tokens=None, num_cached_tokens=0, num_tokens=num_tokens)
        except OutOfBlocksError:
            self._book.revoke(owner)
            failed = PrefillFailed(*owner, self._incarnation, "no memory")
            self.server.send(client, failed)
            return
        step = self.blocks.dispatch_step([owner])
        (table,) = self.blocks.block_tables(owner)
        self._pool.rows[table] = content(int(owner[0]), owner[1], len(table))
        self.blocks.complete_step(step)
        self.blocks.settle(owner, num_tokens)
        self.blocks.lease(owner)
        for offer in self._offers([BlockId(int(block)) for block in table]):
            ticket = self._book.issue(owner, offer, self._clock())
            assert ticket is not None
            self.server.send(client, ticket)
        if not self._keeps_leases:
            self.blocks.release(owner)

    def _offers(self, block_ids: list[BlockId]) -> list[Offer]:
        """Return what covers all blocks: chunks, the last of them sometimes a layer at a time."""
        cut = self._random.randrange(len(block_ids)) if self._random.random() < 0.2 else 0
        chunks = [block_ids[:cut], block_ids[cut:]] if cut else [block_ids]
        in_layers = self._random.random() < 0.2
        ranges = [(0, 0), (1, LAST_LAYER)] if in_layers else [(0, LAST_LAYER)]
        offers: list[Offer] = []
        at = 0
        for number, ids in enumerate(chunks):
            is_last = number == len(chunks) - 1
            named = GroupBlocks(0, at, tuple(ids), tuple(map(self.blocks.generation, ids)))
            at += len(ids)
            for first, last in ranges if is_last else [(0, LAST_LAYER)]:
                is_end = is_last and last == LAST_LAYER
                offers.append(
                    Offer(
                        piece=PieceId(first, last, number),
                        blocks=(named,),
                        num_tokens=at * LAYOUT.block_size,
                        last=is_last,
                        first_token=FirstToken(7) if is_end else None,
                    )
                )
        return offers
