"""Which blocks hold which prefix: a radix tree over token runs, with compressed edges.

A request's work is proportional to the nodes that it touches, and a node is a run of blocks without
a branch: a conversation of a thousand blocks is one node until another one leaves it halfway.

Source: RadixAttention (Zheng et al., SGLang, 2024, section 3), block-aligned.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blockmgr.block_table import HOLE, BlockTable
from blockmgr.free_queue import BlockIds
from blockmgr.pool import BlockPool
from blockmgr.prefix_eviction import PrefixEviction, Recycle
from blockmgr.prefix_node import PrefixNode
from blockmgr.prefix_nodes import PrefixNodes
from blockmgr.token_run import TokenRun
from blockmgr.window import WindowReach, needed_blocks
from core.kv_layout import KVGroup


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Where a prefix is."""

    node: PrefixNode
    """In which it ends."""
    runs: list[list[tuple[range, BlockIds]]]
    """Per group, runs of absolute indices with their block ids."""


class PrefixTree:
    """Finds, keeps and evicts the blocks of prefixes. The first block of a prefix is kept.

    Invariants: those of ``PrefixNodes`` and ``PrefixEviction``; ``check_invariants`` asserts both.
    """

    def __init__(self, groups: Sequence[KVGroup], block_size: int, pool: BlockPool) -> None:
        self._groups = groups
        self._block_size = block_size
        self._windows = [
            WindowReach(at, group, block_size)
            for at, group in enumerate(groups)
            if group.window is not None
        ]
        self._nodes = PrefixNodes(pool.num_blocks, len(groups))
        self.eviction = PrefixEviction(self._nodes, pool, self._windows, num_groups=len(groups))
        pool.cached_listener = self.eviction
        self._version = 0
        """Grows whenever a walk may end elsewhere than before."""
        self._last_walk: tuple[TokenRun | None, int, int] = (None, 0, 0)
        """Of which tokens, how many bytes of them, and in which version."""
        self._last_path: tuple[list[PrefixNode], int] = ([], 0)

    @property
    def num_nodes(self) -> int:
        """Nodes that have a column."""
        return len(self._nodes)

    @property
    def block_ids(self) -> BlockIds:
        """All blocks that can be hit; the work is proportional to the pool."""
        return self._nodes.block_ids

    # Finding

    def count_usable_blocks(self, tokens: TokenRun, most: int) -> int:
        """Return the longest run of at most ``most`` leading blocks that all groups can go on with.

        A group without a window needs all of them; one with a window needs its sinks and what the
        window reaches back to from the end of the run. Changes nothing.
        """
        path, count = self._match(tokens, most)
        if not self._windows or not count:
            return count
        usable = np.ones(count, dtype=np.bool_)
        for reach in self._windows:
            usable &= reach.usable_lengths(_ids_along(path, reach.index, range(count)) != HOLE)
        return int(usable.nonzero()[0][-1]) + 1 if usable.any() else 0

    def find(self, tokens: TokenRun, num_blocks: int) -> PrefixHit | None:
        """Return the blocks with which each group goes on after ``num_blocks`` leading blocks.

        None if one is missing. Changes nothing.
        """
        path, count = self._match(tokens, num_blocks)
        if count < num_blocks:
            return None
        if not self._windows:
            whole = range(num_blocks)
            groups = range(len(self._groups))
            return PrefixHit(path[-1], [[(whole, _ids_along(path, at, whole))] for at in groups])
        num_tokens = num_blocks * self._block_size
        found = [
            [
                (run, _ids_along(path, at, run))
                for run in needed_blocks(group, self._block_size, num_tokens)
            ]
            for at, group in enumerate(self._groups)
        ]
        if any((ids == HOLE).any() for runs in found for _, ids in runs):
            return None
        return PrefixHit(path[-1], found)

    def _match(self, tokens: TokenRun, most: int) -> tuple[list[PrefixNode], int]:
        """Return the nodes along ``tokens``, and how many of at most ``most`` blocks match.

        A request is looked up, priced and admitted: the last answer is kept until a change.
        """
        last, nbytes, version = self._last_walk
        if last is not tokens or nbytes != len(tokens.packed) or version != self._version:
            self._last_walk = (tokens, len(tokens.packed), self._version)
            self._last_path = self._walk(tokens)
        path, matched = self._last_path
        if matched <= most:
            return path, matched
        return [node for node in path if node.start < most], most

    def _walk(self, tokens: TokenRun) -> tuple[list[PrefixNode], int]:
        node = self._nodes.root(tokens.namespace)
        path: list[PrefixNode] = []
        at, num_blocks = 0, tokens.num_blocks
        while node is not None and at < num_blocks and at == node.end:
            node = self._nodes.child(node, tokens.key(at))
            if node is not None:
                at += tokens.count_equal(at, node.tokens, skip=0)
                path.append(node)
        return path, at

    # Keeping

    def offer(
        self,
        tokens: TokenRun,
        tables: Sequence[BlockTable],
        node: PrefixNode | None,
        start: int,
        stop: int,
    ) -> "tuple[PrefixNode, array[int]]":
        """Make the blocks of ``tables`` findable under the first ``stop`` blocks of ``tokens``.

        Columns that are there already are kept, and their holes filled. All blocks of ``tables``
        are owned.

        Args:
            tokens: With at least ``stop`` full blocks.
            tables: One per group.
            node: What an earlier offer returned for the first ``start`` blocks, if it has its
                place (``has_place``); None: begin anew.
            start: Blocks offered before; 0 without ``node``.
            stop: More than ``start``.

        Returns:
            The node for the next offer, and the blocks taken, which the caller gives the hold.
        """
        self._version += 1
        node, at = self._resume(tokens, node, start)
        taken = array("q")
        stop = self._last_present(tables, stop) if self.eviction.is_all_windows else stop
        while at < stop:
            if at < node.end:
                skip = at - node.start
                equal = min(stop - at, tokens.count_equal(at, node.tokens, skip=skip))
                if self._windows:
                    self._fill_holes(node, tables, range(at, at + equal), taken)
                at += equal
                if at < stop and at < node.end:
                    node = self._split(node, at, tokens.block_nbytes)
            elif (child := self._nodes.child(node, tokens.key(at))) is not None:
                node = child
            else:
                node = self._extend(node, tokens, tables, range(at, stop), taken)
                at = stop
        self._nodes.drop_if_empty(node)
        return node, taken

    def _last_present(self, tables: Sequence[BlockTable], stop: int) -> int:
        """Return the end of the last column before ``stop`` that is not all holes."""
        while stop and all(table.block_at(stop - 1) == HOLE for table in tables):
            stop -= 1
        return stop

    def has_place(self, node: PrefixNode, version: int, num_blocks: int) -> bool:
        """Whether the first ``num_blocks`` of an offer, or hit, that ended in ``node`` are there.

        A node that lost its end since may have grown again, with other tokens: ``version``, which
        it had then, tells.
        """
        is_same = self._nodes.is_alive(node) and node.version == version
        return is_same and num_blocks <= node.end

    def extend_leaf(self, node: PrefixNode, column: "array[int]", key: bytearray) -> bool:
        """Put one column behind ``node``, as ``offer`` would: what decoding does all the time.

        Returns:
            False, and nothing was changed: ``node`` is not a leaf of the tree (any more).
        """
        if not self._nodes.is_alive(node) or not self._nodes.is_leaf(node):
            return False
        self._version += 1
        self.eviction.grew(node)
        node.append_one(key, column)
        self._nodes.was_changed(node)
        self._nodes.map(self._without_holes(column), node)
        return True

    def _resume(
        self, tokens: TokenRun, node: PrefixNode | None, start: int
    ) -> tuple[PrefixNode, int]:
        """Return where an offer goes on: at the root if there is no place of an earlier one."""
        if node is not None:
            while start <= node.start and node.parent is not None:
                node = node.parent  # the run was split since
            return node, start
        return self._nodes.make_root(tokens.namespace), 0

    def _extend(
        self,
        node: PrefixNode,
        tokens: TokenRun,
        tables: Sequence[BlockTable],
        indices: range,
        taken: "array[int]",
    ) -> PrefixNode:
        """Put the columns ``indices`` of ``tables`` behind ``node``; return who has them."""
        columns = [table.column(indices) for table in tables]
        run = tokens.slice(indices.start, indices.stop)
        self.eviction.grew(node)
        if self._nodes.is_alive(node) and self._nodes.is_leaf(node):
            node.append(run, columns)
            self._nodes.was_changed(node)
        else:
            node = PrefixNode(node, indices.start, run, columns)
            self._nodes.add(node, tokens.key(indices.start))
            self.eviction.was_added(node)
        for column in columns:
            present = self._without_holes(column)
            self._nodes.map(present, node)
            taken.extend(present)
        return node

    def _split(self, node: PrefixNode, at: int, block_nbytes: int) -> PrefixNode:
        """Give the run of ``node`` up to ``at`` a node of its own, and return that."""
        upper = self._nodes.split(node, at, block_nbytes)
        for row in upper.rows:
            self._nodes.map(self._without_holes(row), upper)
        self.eviction.was_split(node, upper)
        return upper

    def _fill_holes(
        self, node: PrefixNode, tables: Sequence[BlockTable], indices: range, taken: "array[int]"
    ) -> None:
        """Let a group with a window have again what was evicted of it, or never offered."""
        for reach in self._windows:
            row = node.rows[reach.index]
            offered = tables[reach.index].column(indices)
            for at, block_id in zip(indices, offered, strict=True):
                if block_id != HOLE and row[at - node.start] == HOLE:
                    row[at - node.start] = block_id
                    self._nodes.map(array("q", (block_id,)), node)
                    taken.append(block_id)
        self._nodes.was_changed(node)
        self.eviction.was_filled(node)

    def _without_holes(self, row: "array[int]") -> "array[int]":
        if not self._windows or HOLE not in row:
            return row
        return array("q", [block_id for block_id in row if block_id != HOLE])

    # Giving up

    def evict(self, count: int, recycle: Recycle) -> None:
        """Take ``count`` of the CACHED blocks out; see ``PrefixEviction.evict``."""
        self._version += 1
        self.eviction.evict(count, recycle)

    def evict_one(self) -> int | None:
        """Take one CACHED block out; see ``PrefixEviction.evict_one``."""
        self._version += 1
        return self.eviction.evict_one()

    def forget_all(self) -> BlockIds:
        """Empty the tree; return the blocks, which the caller takes the hold of."""
        self._version += 1
        self.eviction.clear()
        return self._nodes.clear()

    def check_invariants(self) -> None:
        """Assert the invariants above."""
        self._nodes.check_invariants()
        self.eviction.check_invariants()


def _ids_along(path: list[PrefixNode], group: int, indices: range) -> BlockIds:
    """Return the ids of ``group`` at ``indices`` along ``path``, holes included."""
    parts = [
        node.row(group, max(node.start, indices.start), min(node.end, indices.stop))
        for node in path
        if node.start < indices.stop and node.end > indices.start
    ]
    return parts[0] if len(parts) == 1 else np.concatenate((*parts, np.empty(0, dtype=np.int64)))
