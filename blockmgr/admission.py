"""Whether a pool may take one more sequence in, beside all that it has taken in already.

    free or evictable blocks
    ├── promised      what is being received still needs them
    ├── reserved      what runs, or will once it is received, grows into them
    └── room          a newcomer fits if all that it needs, and its lookahead, is in here

FENCED and QUARANTINED blocks are in none of these: that they will be free soon is no memory now.
Nothing here knows a block; so a newcomer is refused before anything is looked up or pinned for it.
"""

from core.ids import Owner


class GrowthReserve:
    """Blocks per growing sequence and KV group that stay back; pure arithmetic on integers.

    Admission is *relaxed* while the reserve is 0: a newcomer needs just its own blocks. A
    preemption proves that too many were admitted, so it sets the reserve to ``initial``, and
    admission is *strict*. Every ``decay_steps`` steps without another one, a block less stays
    back, down to ``minimum``, where the reserve begins.

    Source: the decaying reserve of FastDeploy's scheduler (PR 7890), whose cap of a reserve of the
    whole pool by the limit of one sequence is not here.
    """

    def __init__(self, *, initial: int, minimum: int, decay_steps: int) -> None:
        self._initial = initial
        self._minimum = minimum
        self._decay_steps = decay_steps
        self._num_steps = 0
        self.blocks = minimum
        """What stays back now, per growing sequence and group."""

    @property
    def is_strict(self) -> bool:
        """Whether anything stays back."""
        return self.blocks > 0

    def step(self) -> None:
        """A step was dispatched."""
        if self.blocks == self._minimum:
            return
        self._num_steps += 1
        if self._num_steps == self._decay_steps:
            self._num_steps = 0
            self.blocks -= 1

    def preempted(self) -> None:
        """A sequence gave its blocks up because another could not grow."""
        self._num_steps = 0
        self.blocks = max(self._initial, self._minimum)


class Admission:
    """The rule above for one pool, and the promises that it has made.

    A sequence is promised blocks that it takes one piece at a time. Whoever holds a block was
    promised all that it needs, so no two sequences can wait for each other's blocks.

    Invariant: ``promised`` is the sum over all owners that were promised something and neither
    have everything nor are gone. Each of them that does not run yet counts as growing, beside
    those that run.
    """

    def __init__(
        self, reserve: GrowthReserve, *, num_groups: int = 1, num_lookahead_blocks: int = 0
    ) -> None:
        """Begin without a promise.

        Args:
            reserve: For what grows.
            num_groups: KV groups, each of which grows with a sequence.
            num_lookahead_blocks: What a newcomer needs beside its tokens: 1 with speculation.
        """
        self.reserve = reserve
        self._num_groups = num_groups
        self._num_lookahead_blocks = num_lookahead_blocks
        self._promised_to: dict[Owner, int] = {}
        self._running: set[Owner] = set()
        self.promised = 0

    def threshold(self, num_blocks: int, *, num_running: int) -> int:
        """Return how many free blocks it takes to admit a newcomer of ``num_blocks`` blocks."""
        num_growing = num_running + len(self._promised_to) - len(self._running)
        kept = self.reserve.blocks * self._num_groups * num_growing
        return num_blocks + self._num_lookahead_blocks + kept + self.promised

    def room(self, num_allocatable: int, *, num_running: int) -> int:
        """Return how many blocks a newcomer may need; negative where there is less than none."""
        return num_allocatable - self.threshold(0, num_running=num_running)

    def promise(self, owner: Owner, num_blocks: int, *, is_running: bool = False) -> None:
        """Change what ``owner`` still is to get to ``num_blocks``, which may be 0 for now.

        ``is_running``: it is one of ``num_running`` already, as a prompt that gets its blocks
        chunk by chunk.
        """
        self.promised += num_blocks - self._promised_to.get(owner, 0)
        self._promised_to[owner] = num_blocks
        if is_running:
            self._running.add(owner)

    def close(self, owner: Owner) -> None:
        """``owner`` has everything or is gone. An owner without a promise changes nothing."""
        self.promised -= self._promised_to.pop(owner, 0)
        self._running.discard(owner)

    def check_invariants(self) -> None:
        """Assert the invariant above."""
        assert self.promised == sum(self._promised_to.values()), "a promise was lost"
        assert all(num_blocks >= 0 for num_blocks in self._promised_to.values())
        assert self._running <= self._promised_to.keys(), "who runs was promised something"
