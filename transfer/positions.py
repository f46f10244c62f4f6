"""Which blocks here hold the tokens that blocks of a source hold. Arithmetic only.

With blocks of 4 tokens there and of 2 here, and the tokens from 2 to 7 wanted:

    there   [ 0  1  2  3 ][ 4  5  6  . ]
    here          [ 2  3 ][ 4  5 ][ 6 .]     blocks 1 to 3
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from core.kv_layout import KVGroup
from core.messages import GroupBlocks


@dataclass(frozen=True, slots=True)
class Positions:
    """Adjacent positions of one group's block table here."""

    group: int
    first_index: int
    count: int

    def __str__(self) -> str:
        return f"group {self.group} [{self.first_index}, {self.first_index + self.count})"


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Tokens in a block on either side, and which of them decode will ever read."""

    source: int
    here: int
    groups: tuple[KVGroup, ...]

    def indices_there(self, tokens: range) -> range:
        """Return the absolute indices of the source's blocks that hold ``tokens``."""
        return _indices(tokens, self.source)

    def required_there(self, group: int, tokens: range) -> list[int]:
        """Return the source's blocks that decode needs: sinks, and what no window left behind."""
        return _required(self.groups[group], tokens, self.source)

    def positions_of(
        self, blocks: Sequence[GroupBlocks], tokens: range, *, end: int
    ) -> tuple[Positions, ...]:
        """Return where decode keeps ``tokens`` of the source's ``blocks``, in order of group.

        Args:
            blocks: Of the source.
            tokens: Of those blocks: the others are here already, or not computed yet.
            end: Of the prompt: windows count back from it.
        """
        if self.source == self.here:
            return tuple(
                Positions(run.group, run.first_index, len(run.block_ids)) for run in blocks
            )
        found: list[Positions] = []
        for group in sorted({run.group for run in blocks}):
            indices = {
                index
                for run in blocks
                if run.group == group
                for index in _indices(self._tokens_of(run, tokens), self.here)
            }
            needed = _required(self.groups[group], range(tokens.start, end), self.here)
            found += (
                Positions(group, run.start, len(run))
                for run in _adjacent(sorted(indices.intersection(needed)))
            )
        return tuple(found)

    def _tokens_of(self, run: GroupBlocks, tokens: range) -> range:
        """Return those of ``tokens`` that ``run`` holds."""
        start = run.first_index * self.source
        stop = start + len(run.block_ids) * self.source
        return range(max(start, tokens.start), min(stop, tokens.stop))


def _indices(tokens: range, block_size: int) -> range:
    return range(tokens.start // block_size, -(-tokens.stop // block_size)) if tokens else range(0)


def _required(group: KVGroup, tokens: range, block_size: int) -> list[int]:
    indices = _indices(tokens, block_size)
    if group.window is None:
        return [*indices]
    first_live = max(0, tokens.stop - group.window + 1) // block_size
    num_sinks = -(-group.num_sinks // block_size)
    return [index for index in indices if index < num_sinks or index >= first_live]


def _adjacent(indices: Sequence[int]) -> Iterator[range]:
    """Yield the runs of ascending ``indices`` that follow each other."""
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        yield range(members[0], members[-1] + 1)
