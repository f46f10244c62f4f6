"""Where each sequence is: queues, slots, and the transitions between them."""

from collections import deque

from blockmgr.block_manager import BlockManager
from core.ids import OperationId, Owner, Slot
from decode.kv_budget import KVBudget
from decode.sequence import Sequence
from decode.state import Action, Event, State, advance


class SequenceTable:
    """Every live sequence, in exactly one place by its state.

    Invariants (``check_invariants``):
        * a slot belongs to at most one running sequence;
        * the budget's ``promised`` is the sum over the sequences;
        * a sequence that is WAITING or GONE owns no block.
    """

    def __init__(self, blocks: BlockManager, budget: KVBudget, *, max_num_seqs: int) -> None:
        self._blocks = blocks
        self._budget = budget
        self._max_num_seqs = max_num_seqs
        self._sequence_of: dict[Owner, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.loading: dict[OperationId, Sequence] = {}
        self.ready: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of admission: the last is the first victim."""
        self.free_slots = [Slot(index) for index in reversed(range(max_num_seqs))]
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self._sequence_of)

    def __getitem__(self, owner: Owner) -> Sequence:
        return self._sequence_of[owner]

    def get(self, owner: Owner) -> Sequence | None:
        """Return the live sequence of ``owner``."""
        return self._sequence_of.get(owner)

    @property
    def num_running(self) -> int:
        """Sequences in the batch, ready for it, or being loaded."""
        return len(self.running) + len(self.ready) + len(self.loading)

    @property
    def is_preempted_one_waiting(self) -> bool:
        """Whether the next to be computed had to give its blocks up before."""
        return bool(self.waiting) and self.waiting[0].num_preemptions > 0

    @property
    def has_unpromised_remote(self) -> bool:
        """Whether a remote sequence has no memory reserved yet."""
        return any(
            sequence.state is State.REMOTE and sequence.promised_blocks is None
            for sequence in self._sequence_of.values()
        )

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence, WAITING or REMOTE."""
        self._sequence_of[sequence.owner] = sequence
        if sequence.state is State.WAITING:
            self.waiting.append(sequence)

    def make_ready(self, sequence: Sequence) -> None:
        """All of a remote sequence's KV is here; nothing stays reserved for it."""
        self._apply(sequence, Event.DELIVERED)
        self._budget.close_promise(sequence)
        self.ready.append(sequence)

    def recompute(self, sequence: Sequence) -> None:
        """The KV of a REMOTE sequence does not come: it is computed here, before all newcomers.

        Nothing of what was received is kept: only settled blocks are shared, and none of these is.
        """
        self._budget.close_promise(sequence)
        self._apply(sequence, Event.LOAD_FAILED)
        sequence.num_computed = sequence.num_settled = 0
        is_new = (other.num_preemptions == 0 for other in self.waiting)
        place = next((index for index, new in enumerate(is_new) if new), len(self.waiting))
        self.waiting.insert(place, sequence)

    def begin_load(self, sequence: Sequence, operation: OperationId) -> None:
        """``operation`` fills the blocks of a WAITING sequence, which owns them now."""
        self._apply(sequence, Event.LOAD_BEGAN)
        sequence.load = operation
        self.loading[operation] = sequence

    def end_load(self, sequence: Sequence, *, failed: bool) -> None:
        """The load is over. After a failure the sequence is computed, before all that waits."""
        if failed:
            self._apply(sequence, Event.LOAD_FAILED)
            sequence.may_load = False
            sequence.num_computed = sequence.num_settled = 0
            self.waiting.appendleft(sequence)
        else:
            self._apply(sequence, Event.LOADED)
            self.ready.append(sequence)

    @property
    def has_room(self) -> bool:
        """Whether a slot is free that no sequence being loaded will need."""
        return len(self.free_slots) > len(self.loading)

    def start(self, sequence: Sequence) -> Slot:
        """Put a WAITING or READY sequence into the batch and return its slot."""
        self._apply(sequence, Event.ADMITTED)
        slot = sequence.slot = self.free_slots.pop()
        sequence.num_sampling = sequence.num_steps_in_flight = 0
        self.running.append(sequence)
        return slot

    def preempt(self, victim: Sequence) -> None:
        """Take a sequence's blocks; it will be computed anew, before all that only waits."""
        self.num_preemptions += 1
        victim.num_preemptions += 1
        self._budget.count_preemption()
        self._budget.close_promise(victim)
        self._apply(victim, Event.PREEMPTED)
        victim.num_computed = victim.num_settled = 0
        self.waiting.appendleft(victim)

    def end(self, sequence: Sequence, event: Event) -> tuple[Action, ...]:
        """Take a sequence out; its blocks are released."""
        actions = self._apply(sequence, event)
        self._budget.close_promise(sequence)
        self._sequence_of.pop(sequence.owner, None)
        return actions

    def check_invariants(self) -> None:
        """Assert the invariants above: for tests and an idle worker."""
        slots = [s.slot for s in self.running if s.slot is not None] + self.free_slots
        assert sorted(slots) == list(range(self._max_num_seqs)), f"slots lost: {slots}"
        promised = sum(s.promised_blocks or 0 for s in self._sequence_of.values())
        assert self._budget.promised == promised, f"{self._budget.promised} is not {promised}"
        for sequence in self.waiting:
            assert not self._blocks.holds(sequence.owner), f"{sequence.owner} waits with blocks"

    def _apply(self, sequence: Sequence, event: Event) -> tuple[Action, ...]:
        before = sequence.state
        sequence.state, actions = advance(before, event)
        match before:
            case State.WAITING:
                self.waiting.remove(sequence)
            case State.LOADING:
                if sequence.load is not None:
                    del self.loading[sequence.load]
                    sequence.load = None
            case State.READY:
                self.ready.remove(sequence)
            case State.RUNNING:
                self.running.remove(sequence)
            case State.REMOTE | State.GONE:
                pass
        if Action.RELEASE_BLOCKS in actions:
            self._blocks.release(sequence.owner)
        if Action.FREE_SLOT in actions and sequence.slot is not None:
            self.free_slots.append(sequence.slot)
            sequence.slot = None
        return actions
