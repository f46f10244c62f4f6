"""What a released block still waits for: steps on the device, and NIC or copy operations.

Two ledgers that know nothing of each other, since either condition may pass first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from blockmgr.free_queue import BlockIds
from blockmgr.holding import Holding
from core.errors import DoubleReleaseError, InvalidTransitionError
from core.ids import Generation, OperationId, StepSeq


class KVWriters(Enum):
    """Who but the worker's own steps writes KV into its pool."""

    NONE = auto()
    """Nobody: colocated serving."""
    PRODUCER = auto()
    """Nobody: peers only read what a prefill worker computes."""
    CONSUMER = auto()
    """Reads from prefill workers land here."""
    BOTH = auto()
    """A worker of both roles."""


def fences_needed(
    writers: KVWriters, *, releases_meet_steps: bool, has_loading_tier: bool = False
) -> bool:
    """Whether a released block must wait for the steps that may still touch it.

    Steps run in order on one device, so a later step of ours cannot be overtaken by an earlier
    one. Only a writer that is not ordered with the steps (a read that lands, a load from a
    storage tier) can be.

    Args:
        writers: Who writes the pool from outside.
        releases_meet_steps: Whether a step can be in flight at a release: it overlaps with the
            next one, or messages are taken while it runs (docs/decisions/0009).
        has_loading_tier: Whether loads from a tier write the pool.
    """
    is_written_from_outside = writers in {KVWriters.CONSUMER, KVWriters.BOTH} or has_loading_tier
    return releases_meet_steps and is_written_from_outside


@dataclass(slots=True)
class DeferredRelease:
    """Blocks of one release that wait for the steps that were in flight for their owner."""

    block_ids: BlockIds
    """In the order in which they become available."""
    num_steps: int
    """Steps still to retire."""


class StepLedger:
    """Which steps are in flight, whom each may touch, and which releases wait for them.

    Completion is held as the set of steps in flight, so steps may complete in any order.

    Invariants (``check_invariants``):
        * a deferred release is listed under exactly ``num_steps`` steps, all of them in flight;
        * a holding names a step as in flight if and only if the step names the holding (for the
          holdings that are owned, ``BlockReadings.check_invariants`` asserts both directions).
    """

    def __init__(self) -> None:
        self._last = StepSeq(0)
        self._holdings_of_step: dict[StepSeq, list[Holding]] = {}
        self._releases_of_step: dict[StepSeq, list[DeferredRelease]] = {}
        self.num_deferred = 0

    @property
    def last(self) -> StepSeq:
        """The newest dispatched step; 0: none yet."""
        return self._last

    @property
    def num_in_flight(self) -> int:
        """Steps that were dispatched and not retired."""
        return len(self._holdings_of_step)

    def is_in_flight(self, step: StepSeq) -> bool:
        """Whether ``step`` was dispatched and not retired."""
        return step in self._holdings_of_step

    def dispatch(self, holdings: Iterable[Holding]) -> StepSeq:
        """Number a new step that may touch the blocks of ``holdings``."""
        self._last = StepSeq(self._last + 1)
        self._holdings_of_step[self._last] = []
        for holding in holdings:
            self.extend(self._last, holding)
        return self._last

    def extend(self, step: StepSeq, holding: Holding) -> None:
        """Let ``step``, which is in flight, touch the blocks of ``holding`` too."""
        if step not in holding.steps_in_flight:
            holding.steps_in_flight.append(step)
            self._holdings_of_step[step].append(holding)

    def defer(self, block_ids: BlockIds, steps: Sequence[StepSeq]) -> None:
        """Keep ``block_ids`` until all of ``steps`` (at least one, in flight) have retired."""
        release = DeferredRelease(block_ids, num_steps=len(steps))
        for step in steps:
            self._releases_of_step.setdefault(step, []).append(release)
        self.num_deferred += 1

    def retire(self, step: StepSeq) -> list[BlockIds]:
        """End ``step``; return the blocks that waited for it last, in order of their release.

        Raises:
            DoubleReleaseError: it was retired before. Nothing was changed.
            InvalidTransitionError: it was never dispatched.
        """
        if step not in self._holdings_of_step:
            if 0 < step <= self._last:
                raise DoubleReleaseError(f"step {step} was retired before")
            raise InvalidTransitionError(f"step {step} was never dispatched; last is {self._last}")
        for holding in self._holdings_of_step.pop(step):
            holding.steps_in_flight.remove(step)
        passed: list[BlockIds] = []
        for release in self._releases_of_step.pop(step, []):
            release.num_steps -= 1
            if release.num_steps == 0:
                self.num_deferred -= 1
                passed.append(release.block_ids)
        return passed

    def naming(self, holding: Holding) -> list[StepSeq]:
        """The steps in flight that name ``holding``, for a check."""
        return [step for step, named in self._holdings_of_step.items() if holding in named]

    def deferred(self) -> list[BlockIds]:
        """The blocks of each deferred release."""
        releases = {
            id(release): release
            for releases in self._releases_of_step.values()
            for release in releases
        }
        return [release.block_ids for release in releases.values()]

    def check_invariants(self) -> None:
        """Assert the invariants above."""
        times: dict[int, int] = {}
        steps: dict[int, int] = {}
        for step, releases in self._releases_of_step.items():
            assert step in self._holdings_of_step, f"releases wait for step {step}, which is over"
            for release in releases:
                times[id(release)] = times.get(id(release), 0) + 1
                steps[id(release)] = release.num_steps
        assert times == steps, "a deferred release waits for a step that does not know it"
        assert len(steps) == self.num_deferred, "the number of deferred releases is wrong"
        for step, holdings in self._holdings_of_step.items():
            for holding in holdings:
                assert step in holding.steps_in_flight, f"{holding.owner} forgot step {step}"


@dataclass(frozen=True, slots=True)
class PendingOperation:
    """A NIC or copy operation that is not terminal."""

    holding: Holding
    """Whose blocks it names; the owner may have released them since."""
    block_ids: BlockIds
    generations: tuple[Generation, ...]
    """Of ``block_ids`` when it began. They cannot change before it ends."""
    writes: bool


class OperationLedger:
    """Which NIC and copy operations are not terminal, and which blocks each names."""

    def __init__(self) -> None:
        self._pending: dict[OperationId, PendingOperation] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def begin(self, operation: OperationId, pending: PendingOperation) -> None:
        """Record that ``operation``, not pending yet, may touch the blocks of ``pending``."""
        self._pending[operation] = pending
        pending.holding.num_writes += pending.writes

    def end(self, operation: OperationId) -> PendingOperation:
        """Forget ``operation``, which is terminal.

        Raises:
            DoubleReleaseError: it is not pending: it ended before, or never began.
        """
        pending = self._pending.pop(operation, None)
        if pending is None:
            raise DoubleReleaseError(f"operation {operation} is not pending")
        pending.holding.num_writes -= pending.writes
        return pending

    def get(self, operation: OperationId) -> PendingOperation | None:
        """Return ``operation`` if it is pending."""
        return self._pending.get(operation)

    def count_writes(self, holding: Holding) -> int:
        """How many pending operations write blocks of ``holding``, for a check."""
        return sum(op.writes for op in self._pending.values() if op.holding is holding)

    def items(self) -> list[tuple[OperationId, PendingOperation]]:
        """All pending operations, oldest first."""
        return list(self._pending.items())
