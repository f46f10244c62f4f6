"""A worker's world around a block manager: owners, a slow device, a slow NIC, and a byte oracle.

Each method is one thing that can happen; integers choose among what is possible now. The model
knows, from what it did alone, what may still touch each block and what each cell must contain.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from blockmgr.block_manager import BlockManager
from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState
from blockmgr.token_run import TokenRun
from core.errors import OutOfBlocksError
from core.ids import BlockId, Generation, OperationId, Owner, StepSeq
from core.kv_layout import KVGroup
from tests.blockmgr.words import layout_of, owner_of, run_of

BLOCK_SIZE = 2
NUM_BLOCKS = 14
MAX_STEPS = 3
MAX_TOKENS = 14
GROUPS = (KVGroup(layers=(0,)), KVGroup(layers=(1,), window=3, num_sinks=1))
PROMPTS = (
    [1] * 10,
    [1, 1, 1, 1, 2, 2, 2, 2, 2, 2],
    [3] * 10,
    [1, 1, 1, 1, 1, 7, 7, 7, 7, 7],
    [3, 3, 3, 8, 8, 8, 8, 8, 8, 8],
)
"""Some begin as others do, or as others go on: what a request decodes is 7s or 8s."""
Cell = tuple[int, int, int]
"""Block, slot, value."""


def content(group: int, tokens: list[int], position: int) -> int:
    """Return the KV at ``position``: a function of the group and of all tokens so far."""
    digest = hashlib.blake2b(bytes([group, *tokens[: position + 1]]), digest_size=6).digest()
    return int.from_bytes(digest, "little")


def is_read_again(group: KVGroup, position: int, settled: int) -> bool:
    """Whether the query at position ``settled``, or a later one, reads ``position``."""
    if group.window is None or position < group.num_sinks:
        return True
    return settled - position < group.window


@dataclass(eq=False)
class Life:
    """One live owner. A life that ended is no other's equal, even where the owner came back."""

    owner: Owner
    tokens: list[int]
    run: TokenRun
    computed: int
    settled: int
    is_lease: bool = False
    is_receiving: bool = False
    num_reads: int = 0
    """Not terminal yet."""
    rest: "Rest | None" = None


@dataclass
class Step:
    """A dispatched step: blocks to clear, then cells to write, and what settles with it."""

    clear: list[BlockId] = field(default_factory=list[BlockId])
    writes: list[Cell] = field(default_factory=list[Cell])
    ends: list[tuple[Life, int]] = field(default_factory=list[tuple[Life, int]])
    is_executed: bool = False


@dataclass
class Read:
    """A posted read, which writes its cells some time before it is terminal."""

    life: Life
    end: int
    blocks: set[int]
    writes: list[Cell] = field(default_factory=list[Cell])
    has_landed: bool = False


@dataclass
class Rest:
    """Other cells of the blocks that a read fills: they come by a read of their own."""

    targets: list[ReceiveTarget]
    placed: list[list[tuple[BlockId, Generation]]]
    writes: list[Cell]
    end: int


class World:
    """What can happen, and what must hold after it."""

    def __init__(
        self,
        kind: type[BlockManager] = BlockManager,
        groups: tuple[KVGroup, ...] = GROUPS,
    ) -> None:
        self.groups = groups
        self.blocks = kind(
            layout_of(*groups, block_size=BLOCK_SIZE),
            NUM_BLOCKS,
            fences=True,
            prefix_caching=True,
            zero_on_allocate=True,
        )
        self.memory = np.zeros((NUM_BLOCKS, BLOCK_SIZE), dtype=np.int64)
        self.lives: list[Life] = []
        self.steps: dict[StepSeq, Step] = {}
        self.reads: dict[OperationId, Read] = {}
        self.copies: dict[OperationId, set[int]] = {}
        self.let_go: list[tuple[set[int], set[StepSeq]]] = []
        self.num_names = 0
        self.num_operations = 0

    # Owners

    def admit(self, pick: int, length: int, *, local: bool) -> None:
        """A request arrives, to be computed here or to be received."""
        tokens = PROMPTS[pick % len(PROMPTS)][:length]
        run = run_of(tokens, BLOCK_SIZE)
        cached = self.blocks.count_cached_tokens(run, length - 1)
        if pick % 4 == 3:
            cached = 0  # it computes what is here already: equal prefixes at one time
        self.num_names += 1
        life = Life(owner_of(f"R{self.num_names}"), list(tokens), run, cached, cached)
        counts = self.blocks.counts()
        try:
            self.blocks.admit(
                life.owner,
                tokens=run,
                num_cached_tokens=cached,
                num_tokens=length if local else cached,
            )
        except OutOfBlocksError:
            assert self.blocks.counts() == counts
        else:
            self.lives.append(life)

    def release(self, pick: int) -> None:
        """A request ends, in whatever state it is."""
        if self.lives:
            life = self.lives.pop(pick % len(self.lives))
            self._note_let_go(life, self._held(life))
            self.blocks.release(life.owner)

    def preempt(self, pick: int) -> None:
        """A request gives its blocks up, and the same owner comes back if there is room."""
        if not self.lives:
            return
        life = self.lives.pop(pick % len(self.lives))
        self._note_let_go(life, self._held(life))
        self.blocks.release(life.owner)
        cached = self.blocks.count_cached_tokens(life.run, len(life.tokens) - 1)
        again = Life(life.owner, life.tokens, life.run, cached, cached)
        try:
            self.blocks.admit(
                life.owner,
                tokens=life.run,
                num_cached_tokens=cached,
                num_tokens=len(life.tokens),
            )
        except OutOfBlocksError:
            return
        self.lives.append(again)

    def lease(self, pick: int) -> None:
        """A prefill is promised to a reader."""
        ready = [life for life in self.lives if self._can_run(life)]
        if ready:
            life = ready[pick % len(ready)]
            self.blocks.lease(life.owner)
            life.is_lease = True

    def reset_cache(self) -> None:
        """Every hash is forgotten."""
        self.blocks.reset_cache()
        for prompt in PROMPTS:
            assert self.blocks.count_cached_tokens(run_of(prompt, BLOCK_SIZE)) == 0

    # Steps

    def dispatch(self, picks: int) -> None:
        """A step goes to the device; two bits of ``picks`` per owner are its tokens."""
        if len(self.steps) == MAX_STEPS:
            return
        step = Step()
        for index, life in enumerate(self.lives):
            end = life.computed + (picks >> 2 * index & 3)
            if self._can_run(life) and life.computed < end <= MAX_TOKENS:
                self._take_part(step, life, end)
        if step.ends:
            number = self.blocks.dispatch_step(life.owner for life, _ in step.ends)
            step.clear = list(self.blocks.take_zero_list())
            assert not any(read.blocks & set(step.clear) for read in self.reads.values())
            named = [life.owner for life, _ in step.ends]
            step.ends += [
                (life, 0)
                for life in self.lives
                if life.owner not in named and self._held(life) & set(step.clear)
            ]
            self.steps[number] = step

    def execute(self) -> None:
        """The device runs its oldest step."""
        for step in self.steps.values():
            if not step.is_executed:
                self.memory[step.clear] = 0
                self._write(step.writes)
                step.is_executed = True
                return

    def complete(self, pick: int = 0) -> None:
        """The output of a step that has run is seen, not always of the oldest."""
        executed = [number for number, step in self.steps.items() if step.is_executed]
        if executed:
            number = executed[pick % len(executed)]
            step = self.steps.pop(number)
            self.blocks.complete_step(number)
            for life, end in step.ends:
                if life in self.lives and end > life.settled:
                    self._settle(life, end)

    # Reads and copies

    def begin_receive(self, pick: int, count: int) -> None:
        """A read of the next blocks of a request is posted."""
        ready = [life for life in self.lives if self._can_receive(life)]
        if not ready:
            return
        life = ready[pick % len(ready)]
        first = life.computed // BLOCK_SIZE
        count = min(count, -(-len(life.tokens) // BLOCK_SIZE) - first)
        targets = [ReceiveTarget(group, first, count) for group in range(len(self.groups))]
        operation = self._next_operation()
        try:
            placed = self.blocks.begin_receive(life.owner, targets, operation)
        except OutOfBlocksError:
            return
        end = min(len(life.tokens), (first + count) * BLOCK_SIZE)
        read = Read(life, end, blocks={int(at) for part in placed for at, _ in part})
        for position in range(life.computed, end):
            for group, part in enumerate(placed):
                block_id, _ = part[position // BLOCK_SIZE - first]
                value = content(group, life.tokens, position)
                read.writes.append((block_id, position % BLOCK_SIZE, value))
        if pick % 2 and len(read.writes) > 1:
            life.rest = Rest(targets, placed, read.writes[1::2], end)
            read.writes = read.writes[::2]
        self.reads[operation] = read
        life.is_receiving = True
        life.num_reads += 1

    def join_receive(self, pick: int) -> None:
        """The read of the rest of what a request receives is posted."""
        if ready := [life for life in self.lives if life.rest is not None]:
            life = ready[pick % len(ready)]
            rest, life.rest = life.rest, None
            assert rest is not None
            operation = self._next_operation()
            placed = self.blocks.begin_receive(life.owner, rest.targets, operation)
            assert placed == rest.placed, "the second read has other blocks than the first"
            named = {int(at) for part in placed for at, _ in part}
            self.reads[operation] = Read(life, rest.end, named, rest.writes)
            life.num_reads += 1

    def land(self, pick: int) -> None:
        """The NIC writes what a read brings."""
        pending = [read for read in self.reads.values() if not read.has_landed]
        if pending:
            read = pending[pick % len(pending)]
            self._write(read.writes)
            read.has_landed = True

    def end_read(self, pick: int) -> None:
        """A read that has landed is seen to be terminal."""
        landed = [operation for operation, read in self.reads.items() if read.has_landed]
        if landed:
            operation = landed[pick % len(landed)]
            read = self.reads.pop(operation)
            self.blocks.end_operation(operation)
            read.life.num_reads -= 1
            is_here = not read.life.num_reads and read.life.rest is None
            if read.life in self.lives and is_here:
                read.life.is_receiving = False
                read.life.computed = read.end
                self._settle(read.life, read.end)

    def fail_read(self, pick: int) -> None:
        """A read ends without a result, having written all or nothing: its request ends."""
        if self.reads:
            operation = list(self.reads)[pick % len(self.reads)]
            read = self.reads.pop(operation)
            if read.life in self.lives:
                self._note_let_go(read.life, self._held(read.life))
                self.lives.remove(read.life)
                self.blocks.release(read.life.owner)
            self.blocks.end_operation(operation)

    def begin_copy(self, pick: int) -> None:
        """A copy out of a request's blocks starts: of all, or of the last in each table."""
        if self.lives:
            life = self.lives[pick % len(self.lives)]
            tables = self.blocks.block_tables(life.owner)
            first = 0 if pick % 2 else max(map(len, tables)) - 1
            named = {int(at) for table in tables for at in table[first:] if at >= 0}
            if named:
                operation = self._next_operation()
                self.blocks.begin_operation(life.owner, map(BlockId, named), operation)
                self.copies[operation] = named

    def end_copy(self, pick: int) -> None:
        """A copy is terminal."""
        if self.copies:
            operation = list(self.copies)[pick % len(self.copies)]
            del self.copies[operation]
            self.blocks.end_operation(operation)

    # What must hold

    def check(self, *, recount: bool = True) -> None:
        """Assert everything that must hold after any event."""
        self._check_bytes()
        self._check_states()
        if recount:
            self.blocks.check_invariants()

    def finish(self) -> None:
        """Let everything end; then every block can be had again."""
        for life in self.lives:
            self.blocks.release(life.owner)
        for number in self.steps:
            self.blocks.complete_step(number)
        for operation in [*self.reads, *self.copies]:
            self.blocks.end_operation(operation)
        assert self.blocks.num_allocatable == NUM_BLOCKS
        assert not self.blocks.has_pending
        self.blocks.check_invariants()

    def _check_bytes(self) -> None:
        """Every live owner finds its own bytes wherever a query to come reads."""
        for life in self.lives:
            for group, table in enumerate(self.blocks.block_tables(life.owner)):
                for position in range(life.settled):
                    block_id = table[position // BLOCK_SIZE]
                    if block_id >= 0:
                        found = int(self.memory[block_id, position % BLOCK_SIZE])
                        assert found == content(group, life.tokens, position), (life, position)
                    else:
                        assert not is_read_again(self.groups[group], position, life.settled)

    def _check_states(self) -> None:
        """Blocks are withheld exactly while something may touch them."""
        still = [(ids, steps & self.steps.keys()) for ids, steps in self.let_go]
        self.let_go = [(ids, steps) for ids, steps in still if steps]
        owned = {at for life in self.lives for at in self._held(life)}
        fenced = {at for ids, _ in self.let_go for at in ids} - owned
        named = [*(read.blocks for read in self.reads.values()), *self.copies.values()]
        quarantined = {at for ids in named for at in ids} - owned - fenced
        loose = set(range(NUM_BLOCKS)) - owned - fenced - quarantined
        assert self._in_states(BlockState.FENCED) == fenced
        assert self._in_states(BlockState.QUARANTINED) == quarantined
        assert self._in_states(BlockState.FREE, BlockState.CACHED) == loose
        assert self.blocks.num_allocatable == len(loose)
        to_come = [step for step in self.steps.values() if not step.is_executed]
        assert loose.isdisjoint(at for step in to_come for at in step.clear)
        assert loose.isdisjoint(at for step in to_come for at, _, _ in step.writes)

    def _in_states(self, *states: BlockState) -> set[int]:
        return {at for at in range(NUM_BLOCKS) if self.blocks.state(BlockId(at)) in states}

    # Parts of the events

    def _held(self, life: Life) -> set[int]:
        tables = self.blocks.block_tables(life.owner)
        return {int(at) for table in tables for at in table if at >= 0}

    def _can_run(self, life: Life) -> bool:
        is_covered = self.blocks.num_tokens_covered(life.owner) >= life.computed
        return is_covered and not life.is_lease and not life.is_receiving

    def _can_receive(self, life: Life) -> bool:
        covered = self.blocks.num_tokens_covered(life.owner)
        is_next = life.computed == life.settled == covered < len(life.tokens)
        return is_next and self._can_run(life)

    def _take_part(self, step: Step, life: Life, end: int) -> None:
        covered = self.blocks.num_tokens_covered(life.owner)
        try:
            self.blocks.grow(life.owner, end)
        except OutOfBlocksError:
            assert self.blocks.num_tokens_covered(life.owner) == covered
            return
        more = [7 + self.lives.index(life) % 2] * (end - len(life.tokens))
        life.tokens.extend(more)
        life.run.extend(more)
        for group, table in enumerate(self.blocks.block_tables(life.owner)):
            for position in range(life.computed, end):
                block_id = int(table[position // BLOCK_SIZE])
                value = content(group, life.tokens, position)
                step.writes.append((block_id, position % BLOCK_SIZE, value))
        life.computed = end
        step.ends.append((life, end))

    def _settle(self, life: Life, num_tokens: int) -> None:
        before = self._held(life)
        life.settled = num_tokens
        self.blocks.settle(life.owner, num_tokens)
        self._note_let_go(life, before - self._held(life))

    def _note_let_go(self, life: Life, block_ids: set[int]) -> None:
        steps = {
            number
            for number, step in self.steps.items()
            if any(touched is life for touched, _ in step.ends)
        }
        self.let_go.append((block_ids, steps))

    def _write(self, cells: list[Cell]) -> None:
        for block_id, slot, value in cells:
            self.memory[block_id, slot] = value

    def _next_operation(self) -> OperationId:
        self.num_operations += 1
        return OperationId(self.num_operations)
