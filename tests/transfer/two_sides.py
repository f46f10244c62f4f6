"""A prefill and a decode side in one process: real books, real block manager, real bytes.

Only the network is an adversary. ``DecodeSide`` carries the reader's actions out as a worker does;
every block of a source holds bytes that name its request, group and absolute index, so that a
byte at a wrong place or of a wrong life shows.
"""

import itertools
import random
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from blockmgr.block_manager import BlockManager
from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState
from core.config import TransferConfig
from core.errors import OutOfBlocksError, PeerLostError
from core.ids import (
    Attempt,
    BlockId,
    Generation,
    Incarnation,
    OperationId,
    Owner,
    ReadId,
    RequestId,
)
from core.kv_layout import KVGroup, KVLayout
from core.messages import (
    FirstToken,
    GroupBlocks,
    PieceId,
    Reading,
    Released,
    Renew,
    Ticket,
    Withdraw,
)
from tests.transfer.adversary import AdversaryNic, Network
from transfer.actions import (
    Action,
    Allocate,
    CancelRead,
    Deliver,
    Fail,
    OperationTerminal,
    PostRead,
    Send,
    TearDown,
)
from transfer.extents import extents_of
from transfer.reader import Reader
from transfer.tickets import Offer, TicketBook

BLOCK_SIZE = 16


def layout(num_groups: int = 1, layers_per_group: int = 2) -> KVLayout:
    groups = tuple(
        KVGroup(layers=tuple(range(g * layers_per_group, (g + 1) * layers_per_group)))
        for g in range(num_groups)
    )
    return KVLayout(groups, BLOCK_SIZE, num_kv_heads=1, head_dim=1, dtype="float32")


def owner(name: str = "r", attempt: int = 1) -> Owner:
    return RequestId(name), Attempt(attempt)


class Pool:
    """Bytes of one worker, a row per block."""

    def __init__(self, num_blocks: int, kv_layout: KVLayout) -> None:
        self.rows = np.zeros((num_blocks, kv_layout.block_nbytes), dtype=np.uint8)

    @property
    def address(self) -> int:
        return self.rows.ctypes.data

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


def pattern(who: Owner, group: int, index: int, nbytes: int) -> np.ndarray:
    """Bytes that only this position of this request has."""
    seed = f"{who[0]}/{who[1]}/{group}/{index}"
    return np.frombuffer(random.Random(seed).randbytes(nbytes), dtype=np.uint8)


class PrefillSide:
    """A source: computes nothing, but holds, promises and frees blocks as a prefill worker does."""

    def __init__(
        self, network: Network, kv_layout: KVLayout, name: str = "P", *, num_blocks: int = 64
    ) -> None:
        self.incarnation = Incarnation(name)
        self.layout = kv_layout
        self.pool = Pool(num_blocks, kv_layout)
        self.nic = AdversaryNic(network)
        self.nic.register(self.pool.address, self.pool.nbytes)
        self.book = TicketBook(self.incarnation, lease_s=30.0)
        self.free = list(range(num_blocks))[::-1]
        self.held: dict[Owner, list[int]] = {}
        self.is_reading: bool = False
        self.rng = random.Random(1)

    def compute(
        self,
        who: Owner,
        now: float,
        *,
        first_index: int = 0,
        num_blocks: int,
        piece: PieceId | None = None,
        last: bool = True,
    ) -> Ticket:
        """Fill blocks of every group and return the ticket for them."""
        piece = piece or PieceId(0, self.layout.layers_per_group - 1, 0)
        if who not in self.book:
            assert self.book.open(who, reader="D")
        runs: list[GroupBlocks] = []
        for group in range(len(self.layout.groups) if num_blocks else 0):
            ids = [self.free.pop() for _ in range(num_blocks)]
            self.rng.shuffle(ids)
            self.held.setdefault(who, []).extend(ids)
            for index, block in enumerate(ids, start=first_index):
                self.pool.rows[block] = pattern(who, group, index, self.layout.block_nbytes)
            runs.append(
                GroupBlocks(
                    group,
                    first_index,
                    tuple(BlockId(block) for block in ids),
                    tuple(Generation(1) for _ in ids),
                )
            )
        ticket = self.book.issue(
            who,
            Offer(
                piece=piece,
                blocks=tuple(runs),
                num_tokens=(first_index + num_blocks) * BLOCK_SIZE,
                last=last,
                first_token=FirstToken(7) if last else None,
            ),
            now,
        )
        assert ticket is not None
        return ticket

    def take(self, message: object, now: float) -> object | None:
        """Do what a decode worker's message asks; return the answer."""
        match message:
            case Renew():
                return self.book.renew(message, now)
            case Released():
                self.give_back(self.book.released(message))
            case Withdraw():
                self.give_back(self.book.withdraw(message))
            case Reading(active):
                self.is_reading = active
        return None

    def expire(self, now: float) -> list[Owner]:
        gone = self.book.expire(now)
        for who in gone:
            self.give_back(who)
        return gone

    def give_back(self, who: Owner | None) -> None:
        """Free the blocks of ``who`` and let other KV overwrite them at once."""
        if who is not None:
            for block in self.held.pop(who, []):
                self.pool.rows[block] = 0xEE
                self.free.append(block)


class DecodeSide:
    """A reader with its shell: memory, network and what it has told the worker."""

    def __init__(
        self,
        network: Network,
        kv_layout: KVLayout,
        *,
        num_blocks: int = 10,
        reader: type[Reader] = Reader,
        max_quarantined_blocks: int = 1000,
        config: TransferConfig | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.layout = kv_layout
        self.pool = Pool(num_blocks, kv_layout)
        self.nic = AdversaryNic(network, rng=rng)
        self.nic.register(self.pool.address, self.pool.nbytes)
        self.blocks = BlockManager(kv_layout, num_blocks, fences=False, prefix_caching=False)
        self.reader = reader(
            layout=kv_layout,
            config=config or TransferConfig(),
            max_quarantined_blocks=max_quarantined_blocks,
        )
        self.now = 100.0
        self.sources: dict[Incarnation, PrefillSide] = {}
        self.sent: list[object] = []
        self.outbox: deque[tuple[Incarnation, object]] = deque()
        self.delivered: dict[Owner, Deliver] = {}
        self.failed: dict[Owner, Fail] = {}
        self.torn: list[Incarnation] = []
        self.cancelled: list[OperationId] = []
        self.ended: list[OperationId] = []
        self.operation_of_read: dict[ReadId, OperationId] = {}
        self.auto_allocate = True
        self._operations = map(OperationId, itertools.count(1))

    def pair(self, source: PrefillSide) -> None:
        self.sources[source.incarnation] = source
        self.nic.connect(source.incarnation, source.nic.endpoint())

    def request(self, who: Owner, source: PrefillSide, *, cached_blocks: int = 0) -> None:
        num_tokens = cached_blocks * BLOCK_SIZE
        self.blocks.admit(who, tokens=None, num_cached_tokens=0, num_tokens=num_tokens)
        self.carry_out(self.reader.requested(who, source.incarnation, self.now))

    def ticket(self, ticket: Ticket) -> None:
        self.carry_out(self.reader.ticket(ticket, self.now))

    def cancel(self, who: Owner) -> None:
        self.carry_out(self.reader.cancel(who, self.now))
        self.forget(who)

    def roll_back(self, who: Owner) -> None:
        self.carry_out(self.reader.roll_back(who, self.now))
        self.blocks.release(who)
        self.blocks.admit(who, tokens=None, num_cached_tokens=0, num_tokens=0)

    def forget(self, who: Owner) -> None:
        if self.blocks.holds(who):
            self.blocks.release(who)

    def allocate(self, who: Owner, ticket: Ticket) -> bool:
        """Answer one ``Allocate``; False: no memory."""
        targets = [
            ReceiveTarget(run.group, run.first_index, len(run.block_ids)) for run in ticket.blocks
        ]
        operation = next(self._operations)
        try:
            placed = self.blocks.begin_receive(who, targets, operation)
        except OutOfBlocksError:
            return False
        local = [
            replace_blocks(run, [block for block, _ in part], [life for _, life in part])
            for run, part in zip(ticket.blocks, placed, strict=True)
        ]
        self.carry_out(self.reader.allocated(who, ticket.piece, local, operation, self.now))
        return True

    def retry(self) -> None:
        for who, ticket in self.reader.unallocated():
            if self.reader.is_receiving(who):  # a post that failed may have ended it
                self.allocate(who, ticket)

    def poll(self) -> None:
        """Take what the network says is terminal."""
        for outcome in self.nic.poll():
            operation = self.operation_of_read[outcome.read]
            if outcome.failure is None:
                self.carry_out(self.reader.landed(operation, self.now))
            else:
                self.carry_out(self.reader.read_failed(operation, outcome.failure, self.now))

    def land_all(self) -> None:
        self.nic.finish()
        self.poll()

    def tick(self) -> None:
        self.carry_out(self.reader.tick(self.now))

    def exchange(self) -> None:
        """Deliver every message to its source, and the answers."""
        while self.outbox:
            peer, message = self.outbox.popleft()
            source = self.sources.get(peer)
            answer = source and source.take(message, self.now)
            if answer is not None:
                self.carry_out(self.reader.renewed(answer, peer, self.now))  # type: ignore[arg-type]

    def carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Allocate(who, ticket):
                if self.auto_allocate:
                    self.allocate(who, ticket)
            case PostRead():
                self._post(action)
            case OperationTerminal(operation):
                self.ended.append(operation)
                self.blocks.end_operation(operation)
            case Deliver(who):
                assert who not in self.delivered, "delivered twice"
                self.delivered[who] = action
            case Fail(who):
                assert who not in self.failed, "failed twice"
                self.failed[who] = action
                self.forget(who)
            case Send(peer, message):
                self.sent.append(message)
                self.outbox.append((peer, message))
            case CancelRead(operation):
                self.cancelled.append(operation)  # all of it is posted: it ends by itself
            case TearDown():
                self._tear_down(action)

    def _post(self, post: PostRead) -> None:
        try:
            read = self.nic.read(post.peer, extents_of(post, self.layout))
        except PeerLostError as error:
            self.carry_out(self.reader.read_failed(post.operation, str(error), self.now))
        else:
            self.operation_of_read[read] = post.operation
            self.reader.begun(post.operation, self.now)

    def _tear_down(self, action: TearDown) -> None:
        self.torn.append(action.peer)
        for read in self.nic.tear_down(action.peer):
            operation = self.operation_of_read[read]
            self.carry_out(self.reader.read_failed(operation, action.reason, self.now))

    # What a test asks

    def count(self, state: BlockState) -> int:
        return self.blocks.counts()[state]

    @property
    def num_free(self) -> int:
        return self.count(BlockState.FREE)

    def wrong_positions(self, who: Owner, *, first_index: int = 0) -> list[tuple[int, int]]:
        """Return (group, index) of received blocks whose bytes are not the request's own."""
        wrong: list[tuple[int, int]] = []
        for group, table in enumerate(self.blocks.block_tables(who)):
            for index, block in enumerate(table.tolist()):
                if index < first_index:
                    continue
                want = pattern(who, group, index, self.layout.block_nbytes)
                if not (self.pool.rows[block] == want).all():
                    wrong.append((group, index))
        return wrong

    def check(self) -> None:
        self.reader.check_invariants()
        self.blocks.check_invariants()


def replace_blocks(
    run: GroupBlocks, block_ids: Sequence[BlockId], generations: Sequence[Generation]
) -> GroupBlocks:
    return GroupBlocks(run.group, run.first_index, tuple(block_ids), tuple(generations))


def with_blocks(ticket: Ticket, blocks: Sequence[GroupBlocks]) -> Ticket:
    fields = {name: getattr(ticket, name) for name in ticket.__struct_fields__}
    return Ticket(**{**fields, "blocks": tuple(blocks)})
