"""Which block of each KV group holds which prefix."""

from collections.abc import Sequence

import numpy as np

from blockmgr.block_queue import BlockIds
from blockmgr.window import first_live_block, needed_blocks, num_sink_blocks
from core.kv_layout import KVGroup


class PrefixCache:
    """Maps the hash of a full block to one block per group. The first block of a hash is kept.

    Invariants (``check_invariants``): block of hash and key of block are inverse to each other.
    """

    def __init__(self, groups: Sequence[KVGroup], block_size: int) -> None:
        self._groups = groups
        self._block_size = block_size
        self._block_of_hash: list[dict[bytes, int]] = [{} for _ in groups]
        self._key_of_block: dict[int, tuple[int, bytes]] = {}

    def count_usable_blocks(self, hashes: Sequence[bytes]) -> int:
        """Return the longest run of leading blocks with which every group can go on.

        A group without a window needs all of them; one with a window needs its sinks and what the
        window reaches back to from the end of the run. Changes nothing.
        """
        bound = len(hashes)
        for index, group in enumerate(self._groups):
            if group.window is None:
                bound = self._count_leading(index, hashes, bound)
        checks = [
            (group, self._count_leading(index, hashes, bound), self._runs(index, hashes[:bound]))
            for index, group in enumerate(self._groups)
            if group.window is not None
        ]
        for num_blocks in range(bound, 0, -1):
            if all(self._reaches(num_blocks, *check) for check in checks):
                return num_blocks
        return 0

    def find(self, hashes: Sequence[bytes], num_blocks: int) -> list[list[tuple[range, BlockIds]]]:
        """Return the blocks with which each group goes on after ``num_blocks`` leading blocks.

        Per group, runs of absolute indices with their block ids.

        Raises:
            KeyError: a needed block is not cached.
        """
        return [
            [
                (run, np.array([block_of_hash[hashes[at]] for at in run], dtype=np.int32))
                for run in needed_blocks(group, self._block_size, num_blocks * self._block_size)
            ]
            for group, block_of_hash in zip(self._groups, self._block_of_hash, strict=True)
        ]

    def insert(self, group: int, block_hash: bytes, block_id: int) -> bool:
        """Make ``block_id`` the block of ``block_hash``; False if there is one already."""
        if block_hash in self._block_of_hash[group] or block_id in self._key_of_block:
            return False
        self._block_of_hash[group][block_hash] = block_id
        self._key_of_block[block_id] = (group, block_hash)
        return True

    def forget(self, block_ids: BlockIds) -> None:
        """Remove ``block_ids``, all of them known."""
        for block_id in block_ids.tolist():
            group, block_hash = self._key_of_block.pop(block_id)
            del self._block_of_hash[group][block_hash]

    @property
    def block_ids(self) -> BlockIds:
        """All blocks that can be hit."""
        return np.fromiter(self._key_of_block, dtype=np.int32, count=len(self._key_of_block))

    def check_invariants(self) -> None:
        """Assert the invariant above."""
        forward = {
            block_id: (group, block_hash)
            for group, block_of_hash in enumerate(self._block_of_hash)
            for block_hash, block_id in block_of_hash.items()
        }
        assert forward == self._key_of_block, "the prefix cache's two maps disagree"

    def _count_leading(self, group: int, hashes: Sequence[bytes], bound: int) -> int:
        block_of_hash = self._block_of_hash[group]
        for index in range(bound):
            if hashes[index] not in block_of_hash:
                return index
        return bound

    def _runs(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        """Return, for each index, how many cached blocks in a row end there."""
        block_of_hash = self._block_of_hash[group]
        runs: list[int] = []
        length = 0
        for block_hash in hashes:
            length = length + 1 if block_hash in block_of_hash else 0
            runs.append(length)
        return runs

    def _reaches(self, num_blocks: int, group: KVGroup, leading: int, runs: Sequence[int]) -> bool:
        first = first_live_block(group, self._block_size, num_blocks * self._block_size)
        has_window = runs[num_blocks - 1] >= num_blocks - first
        return has_window and leading >= min(num_sink_blocks(group, self._block_size), num_blocks)
