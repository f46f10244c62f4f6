"""I10 over a whole decode worker: scheduler, reader, block manager, steps, reads, and its bytes.

In each cell one thing goes wrong at one point of a request's life. At once another owner takes
every block that is FREE and fills it; then all that is late happens: reads land, steps run. The
other owner's bytes must not change, poison must not be hit, the request must end once, and at the
end every block of both workers is free. The reader alone has such a matrix, too.
"""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.history import BlockHistory
from blockmgr.poison import Poison
from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState
from core.config import SchedulerConfig
from core.errors import MemoryCorruptionError
from core.ids import OperationId, Owner
from core.messages import PieceId, PrefillFailed, Ticket
from core.sampling import SamplingParams
from decode.scheduler import DecodeScheduler
from decode.sequence import Sequence
from decode.state import State
from engine.batch import SampledToken, StepBatch, StepOutput
from tests.transfer.adversary import Network
from tests.transfer.two_sides import (
    BLOCK_SIZE,
    DecodeSide,
    Pool,
    PrefillSide,
    layout,
    owner,
    replace_blocks,
)
from transfer.actions import Action, Deliver, Fail

R, INTRUDER = owner("r"), owner("intruder")
NUM_BLOCKS = 10
PROMPT = tuple(range(60))
"""Four blocks, the last one not full."""
MAX_TOKENS = 20


class PoolMemory:
    """The pool's bytes as poison sees them."""

    num_blocks = NUM_BLOCKS

    def __init__(self, pool: Pool) -> None:
        self._words = pool.rows.view(np.int32)

    def fill_words(self, block_ids: np.ndarray, words: np.ndarray) -> None:
        self._words[block_ids] = words[:, None]

    def find_other_word(self, block_ids: np.ndarray, words: np.ndarray) -> tuple[int, int] | None:
        found = np.argwhere(self._words[block_ids] != words[:, None])
        return None if not len(found) else (int(found[0][0]), int(found[0][1]) * 4)


class Worker(DecodeSide):
    """A decode worker; its device runs a step when it is told to."""

    def __init__(self, network: Network, *, fences: bool = True) -> None:
        super().__init__(network, layout(), num_blocks=NUM_BLOCKS)
        history = BlockHistory(NUM_BLOCKS)
        self.poison = Poison(NUM_BLOCKS, PoolMemory(self.pool), history, seed=5)
        self.blocks = BlockManager(
            self.layout,
            NUM_BLOCKS,
            fences=fences,
            prefix_caching=False,
            observers=(self.poison,),
            history=history,
        )
        config = SchedulerConfig(reserve_blocks_min=0)
        self.scheduler = DecodeScheduler(self.blocks, self.layout, config, fingerprint="model")
        self.steps: list[StepBatch] = []
        self.finished: list[Owner] = []

    # What the shell does

    def generate(self, source: PrefillSide) -> None:
        sampling = SamplingParams(seed=0, max_tokens=MAX_TOKENS)
        self.scheduler.add(Sequence(R, PROMPT, sampling), remote=True)
        wanted = range(len(PROMPT))
        self.carry_out(self.reader.requested(R, source.incarnation, self.now, wanted=wanted))

    def abort(self) -> None:
        if self.scheduler.abort(R):
            self.carry_out(self.reader.cancel(R, self.now))

    def allocate(self, who: Owner, ticket: Ticket) -> bool:
        targets = [ReceiveTarget(n.group, n.first_index, len(n.block_ids)) for n in ticket.blocks]
        operation = next(self._operations)
        placed = self.scheduler.receive(who, targets, operation)
        if placed is None:
            return False
        local = [
            replace_blocks(run, [block for block, _ in part], [life for _, life in part])
            for run, part in zip(ticket.blocks, placed, strict=True)
        ]
        self.carry_out(self.reader.allocated(who, ticket.piece, local, operation, self.now))
        return True

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Fail):
            assert action.owner not in self.failed, "failed twice"
            self.failed[action.owner] = action
            self.scheduler.lose_prefill(action.owner)
            return
        super()._carry_out(action)
        if isinstance(action, Deliver):
            assert self.wrong_positions(action.owner) == []
            self.scheduler.deliver(action.owner, action.first_token.token_id)

    # The device

    def dispatch(self) -> None:
        if (batch := self.scheduler.schedule()) is not None:
            self.steps.append(batch)

    def execute(self, batch: StepBatch) -> None:
        """The device writes each token's KV, in both layers."""
        slots = self.pool.rows.view(np.float32).reshape(NUM_BLOCKS, 2, 2, BLOCK_SIZE)
        for part in batch.sequences:
            for position in range(part.position, part.position + part.num_tokens):
                block_id = part.block_tables[0][position // BLOCK_SIZE]
                slots[block_id, :, :, position % BLOCK_SIZE] = -1.0

    def run_steps(self) -> None:
        while self.steps:
            batch = self.steps.pop(0)
            self.execute(batch)
            tokens = tuple(SampledToken(part.slot, 7) for part in batch.sequences if part.sample)
            for progress in self.scheduler.complete(StepOutput(batch.step, tokens, 0.0)):
                if progress.finish_reason is not None:
                    self.finished.append(progress.sequence.owner)

    # The other owner

    def intrude(self) -> None:
        """Take and fill every block that is FREE."""
        self.blocks.admit(
            INTRUDER, tokens=None, num_cached_tokens=0, num_tokens=self.num_free * BLOCK_SIZE
        )
        self.taken = self.blocks.block_tables(INTRUDER)[0]
        self.pool.rows[self.taken] = 0xA5

    def leave(self) -> None:
        assert (self.pool.rows[self.taken] == 0xA5).all(), "the intruder's bytes changed"
        self.blocks.release(INTRUDER)

    def check(self) -> None:
        super().check()
        self.scheduler.check_invariants()


Step = Callable[[Worker, PrefillSide], None]


def offer(worker: Worker, prefill: PrefillSide) -> None:
    worker.generate(prefill)
    for chunk in (0, 1):
        piece = PieceId(0, 1, chunk)
        ticket = prefill.compute(
            R, worker.now, first_index=2 * chunk, num_blocks=2, piece=piece, last=chunk == 1
        )
        num_tokens = min(ticket.num_tokens, len(PROMPT))  # the last block is not full
        worker.ticket(msgspec.structs.replace(ticket, num_tokens=num_tokens))


# Points of a request's life


def before_post(worker: Worker, prefill: PrefillSide) -> None:
    worker.auto_allocate = False
    offer(worker, prefill)


def posted(worker: Worker, prefill: PrefillSide) -> None:
    offer(worker, prefill)


def partly_landed(worker: Worker, prefill: PrefillSide) -> None:
    offer(worker, prefill)
    worker.nic.step(len([write for write in worker.nic.writes if write.read == 1]))
    worker.poll()


def landed_not_notified(worker: Worker, prefill: PrefillSide) -> None:
    offer(worker, prefill)
    worker.nic.finish()


def notified_not_promoted(worker: Worker, prefill: PrefillSide) -> None:
    """All has landed, but the leases ended unrenewed: nothing may be trusted yet."""
    offer(worker, prefill)
    worker.now += 31
    worker.land_all()
    assert R not in worker.delivered


def running(worker: Worker, prefill: PrefillSide) -> None:
    """Two steps are on the device, neither has run."""
    offer(worker, prefill)
    worker.land_all()
    worker.dispatch()
    worker.dispatch()
    assert len(worker.steps) == 2


# What goes wrong


def abort(worker: Worker, _: PrefillSide) -> None:
    worker.abort()


def finish(worker: Worker, prefill: PrefillSide) -> None:
    """The request runs to its end; until it runs, its source ends it."""
    if worker.steps:
        while R not in worker.finished:
            worker.run_steps()
            worker.dispatch()
            worker.dispatch()
        return
    prefill.book.revoke(R)
    message = PrefillFailed(*R, prefill.incarnation, "gave up")
    worker.carry_out(worker.reader.prefill_failed(message, worker.now))


def preempt(worker: Worker, _: PrefillSide) -> None:
    """Memory is short: who runs gives its blocks up, who receives keeps what it was promised."""
    worker.run_steps()
    sequence = worker.scheduler.get(R)
    if sequence is not None and sequence.state is State.RUNNING:
        worker.scheduler._table.preempt(sequence)


def peer_death(worker: Worker, prefill: PrefillSide) -> None:
    worker.nic.kill(prefill.incarnation)
    worker.carry_out(worker.reader.source_lost(prefill.incarnation, "killed", worker.now))
    worker.poll()


def timeout(worker: Worker, prefill: PrefillSide) -> None:
    """The source freezes; every deadline passes unanswered."""
    worker.nic.freeze(prefill.incarnation)
    for _ in range(50):
        worker.outbox.clear()
        deadline = worker.reader.next_deadline()
        if deadline is None:
            break
        worker.now = max(worker.now, deadline)
        worker.tick()


def duplicate(worker: Worker, _: PrefillSide) -> None:
    worker.nic.duplicates_outcomes = True
    for operation in worker.ended:
        worker.carry_out(worker.reader.landed(operation, worker.now))


def reorder(worker: Worker, _: PrefillSide) -> None:
    worker.nic.writes.reverse()
    for batch in reversed(worker.steps):
        worker.execute(batch)  # the device overtakes; completions stay in order


WHEN = [before_post, posted, partly_landed, landed_not_notified, notified_not_promoted, running]
WHAT = [abort, finish, preempt, peer_death, timeout, duplicate, reorder]


@pytest.mark.parametrize("when", WHEN, ids=lambda step: step.__name__)
@pytest.mark.parametrize("what", WHAT, ids=lambda step: step.__name__)
def test_i10_fault_matrix_of_a_worker(when: Step, what: Step) -> None:
    network = Network()
    worker, prefill = Worker(network), PrefillSide(network, layout())
    worker.pair(prefill)

    when(worker, prefill)
    what(worker, prefill)
    worker.check()
    worker.intrude()
    happen_late(worker, prefill)
    worker.leave()
    drain(worker, prefill)

    assert_ended_once(worker, when, what)
    assert worker.blocks.counts()[BlockState.FREE] == NUM_BLOCKS
    assert len(prefill.free) == 64
    assert worker.reader.num_operations == 0
    # Nothing has written a free block up to the end.
    worker.intrude()
    worker.leave()


def happen_late(worker: Worker, prefill: PrefillSide) -> None:
    """All that was on its way arrives."""
    worker.nic.thaw(prefill.incarnation)
    worker.land_all()
    worker.run_steps()
    worker.check()


def drain(worker: Worker, prefill: PrefillSide) -> None:
    """Give the request what it still waits for, until nothing happens any more."""
    worker.auto_allocate = True
    for _ in range(MAX_TOKENS + 10):
        worker.retry()
        worker.exchange()
        worker.land_all()
        worker.dispatch()
        worker.run_steps()
    worker.check()
    prefill.expire(worker.now + 1000)


def assert_ended_once(worker: Worker, when: Step, what: Step) -> None:
    ends = worker.finished.count(R), list(worker.failed).count(R)
    if what is abort:
        assert ends == (0, 0)
    elif what in {finish, peer_death} and when is not running:
        assert ends == (0, 1)
    elif what is timeout:
        assert sum(ends) == 1  # a source that wakes in time may still serve
    else:
        assert ends == (1, 0)
    assert worker.scheduler.get(R) is None


def test_j03_without_step_fences_the_matrix_fails() -> None:
    network = Network()
    worker, prefill = Worker(network, fences=False), PrefillSide(network, layout())
    worker.pair(prefill)
    running(worker, prefill)
    abort(worker, prefill)
    worker.intrude()
    happen_late(worker, prefill)
    with pytest.raises(AssertionError, match="the intruder's bytes changed"):
        worker.leave()


def test_j03_where_a_cancel_is_taken_for_proof_the_matrix_fails() -> None:
    network = Network()
    worker, prefill = Worker(network), PrefillSide(network, layout())
    worker.pair(prefill)
    posted(worker, prefill)
    worker.scheduler.abort(R)
    for operation in (1, 2):
        worker.blocks.end_operation(OperationId(operation))
    worker.nic.step()
    with pytest.raises(MemoryCorruptionError, match=r"last_owner=\('r', 1\) last_operation="):
        worker.intrude()
