"""Which blocks hold which prefix: a radix tree over token runs, with compressed edges.

A request's work is proportional to the nodes that it touches, and a node is a run of blocks without
a branch: a conversation of a thousand blocks is one node until another one leaves it halfway.

Source: RadixAttention (Zheng et al., SGLang, 2024, section 3), block-aligned.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from blockmgr.block_table import HOLE, BlockTable
from blockmgr.eviction_order import LeafOrder
from blockmgr.free_queue import BlockIds
from blockmgr.pool import BlockPool
from blockmgr.prefix_node import PrefixNode
from blockmgr.token_run import TokenRun
from blockmgr.window import WindowReach, needed_blocks
from core.kv_layout import KVGroup

_NOWHERE = -1
_FEW = 16


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Where a prefix is."""

    node: PrefixNode
    """In which it ends."""
    runs: list[list[tuple[range, BlockIds]]]
    """Per group, runs of absolute indices with their block ids."""


@dataclass(frozen=True, slots=True)
class _Match:
    """The answer to a walk, and for what it holds."""

    tokens: TokenRun | None
    nbytes: int
    version: int
    path: list[PrefixNode]
    num_blocks: int

    def is_for(self, tokens: TokenRun, version: int) -> bool:
        return (
            self.tokens is tokens and self.version == version and self.nbytes == len(tokens.packed)
        )


class PrefixTree:
    """Finds, keeps and evicts the blocks of prefixes. The first block of a prefix is kept.

    The pool tells it which blocks got out of use (``became_cached``) and into use again
    (``left_cached``); nothing else moves a node in the order of eviction.

    Invariants (``check_invariants``):
        * a block is in at most one column, in the node that it is mapped to;
        * the children of a node differ in their first block; only a root has no column;
        * a leaf is in the order of eviction exactly if its last column is CACHED in all groups;
        * a node with a CACHED block that no hit at its end needs is in the order of windows.
    """

    def __init__(self, groups: Sequence[KVGroup], block_size: int, pool: BlockPool) -> None:
        self._groups = groups
        self._block_size = block_size
        self._pool = pool
        self._windows = [
            WindowReach(at, group, block_size)
            for at, group in enumerate(groups)
            if group.window is not None
        ]
        self._is_all_windows = len(self._windows) == len(groups)
        self._roots: dict[bytes, PrefixNode] = {}
        self._nodes: list[PrefixNode | None] = []
        self._free_indices: list[int] = []
        self._index_of = array("q", [_NOWHERE]) * pool.num_blocks
        self._index_of_block = np.frombuffer(self._index_of, dtype=np.int64)
        self._leaves = LeafOrder()
        self._window_order: dict[PrefixNode, None] = {}
        """Nodes whose blocks in groups with a window may be evictable, longest unused first."""
        self._time = 0
        self._version = 0
        """Grows whenever a walk may end elsewhere than before."""
        self._last_match = _Match(None, 0, 0, [], 0)

    @property
    def num_nodes(self) -> int:
        """Nodes that have a column."""
        return len(self._nodes) - len(self._free_indices)

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
        num_tokens = num_blocks * self._block_size
        found = [
            [
                (run, _ids_along(path, at, run))
                for run in needed_blocks(group, self._block_size, num_tokens)
            ]
            for at, group in enumerate(self._groups)
        ]
        if self._windows and any((ids == HOLE).any() for runs in found for _, ids in runs):
            return None
        return PrefixHit(path[-1], found)

    def _match(self, tokens: TokenRun, most: int) -> tuple[list[PrefixNode], int]:
        """Return the nodes along ``tokens``, and how many of at most ``most`` blocks match.

        A request is looked up, priced and admitted: the last answer is kept until a change.
        """
        if self._last_match.is_for(tokens, self._version):
            path, matched = self._last_match.path, self._last_match.num_blocks
        else:
            path, matched = self._walk(tokens)
            self._last_match = _Match(tokens, len(tokens.packed), self._version, path, matched)
        if matched <= most:
            return path, matched
        return [node for node in path if node.start < most], most

    def _walk(self, tokens: TokenRun) -> tuple[list[PrefixNode], int]:
        node = self._roots.get(tokens.namespace)
        path: list[PrefixNode] = []
        at, num_blocks = 0, tokens.num_blocks
        while node is not None and at < num_blocks and at == node.end:
            node = node.children.get(tokens.key(at))
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
            node: What an earlier offer returned for the first ``start`` blocks; None: none did.
            start: Blocks offered before.
            stop: More than ``start``.

        Returns:
            The node for the next offer, and the blocks taken, which the caller gives the hold.
        """
        self._version += 1
        node, at = self._resume(tokens, node, start)
        taken = array("q")
        while at < stop:
            if at < node.end:
                skip = at - node.start
                equal = min(stop - at, tokens.count_equal(at, node.tokens, skip=skip))
                if self._windows:
                    self._fill_holes(node, tables, range(at, at + equal), taken)
                at += equal
                if at < stop and at < node.end:
                    node = self._split(node, at, tokens.block_nbytes)
            elif (child := node.children.get(tokens.key(at))) is not None:
                node = child
            else:
                node = self._extend(node, tokens, tables, range(at, stop), taken)
                at = stop
        return node, taken

    def extend_leaf(self, node: PrefixNode, column: "array[int]", key: bytearray) -> bool:
        """Put one column behind ``node``, as ``offer`` would: what decoding does all the time.

        Returns:
            False, and nothing was changed: ``node`` is not a leaf of the tree (any more).
        """
        if node.children or node.parent is None or node.index == _NOWHERE:
            return False
        self._version += 1
        if node.is_ordered:
            self._leaves.remove(node)
        if self._windows:
            self._window_order.setdefault(node)
        node.append_one(key, column)
        for block_id in column:
            if block_id != HOLE:
                self._index_of[block_id] = node.index
        return True

    def _resume(
        self, tokens: TokenRun, node: PrefixNode | None, start: int
    ) -> tuple[PrefixNode, int]:
        """Return where an offer goes on: at the root if the place of the last one is gone."""
        if node is not None and node.index != _NOWHERE and start <= node.end:
            while start <= node.start and node.parent is not None:
                node = node.parent  # the run was split since
            return node, start
        root = self._roots.get(tokens.namespace)
        if root is None:
            root = PrefixNode(None, 0, bytearray(), [array("q") for _ in self._groups])
            root.key = tokens.namespace
            self._roots[tokens.namespace] = root
        return root, 0

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
        self._leaves.remove(node)
        if node.parent is not None and not node.children:
            node.append(run, columns)
        else:
            child = PrefixNode(node, indices.start, run, columns)
            child.key = tokens.key(indices.start)
            node.children[child.key] = child
            self._enter(child)
            if self._windows:
                self._window_order.setdefault(node)
            node = child
        if self._windows:
            self._window_order.setdefault(node)
        for column in columns:
            present = self._without_holes(column)
            self._map(present, node.index)
            taken.extend(present)
        return node

    def _split(self, node: PrefixNode, at: int, block_nbytes: int) -> PrefixNode:
        """Give the run of ``node`` up to ``at`` a node of its own, and return that."""
        upper = node.split(at, block_nbytes)
        self._enter(upper)
        for row in upper.rows:
            self._map(self._without_holes(row), upper.index)
        if self._windows:
            self._window_order.setdefault(upper)
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
                    self._index_of[block_id] = node.index
                    taken.append(block_id)

    # In use and out of use

    def became_cached(self, block_ids: BlockIds) -> None:
        """Nobody uses ``block_ids`` any more, as of now."""
        self._time += 1
        for node in self._nodes_of(block_ids):
            node.last_used = self._time
            if self._windows:
                node.window_used = self._time
                self._window_order.pop(node, None)
                self._window_order[node] = None
            if not node.children and self._is_unused_at_end(node):
                self._leaves.add(node)

    def left_cached(self, block_ids: BlockIds) -> None:
        """``block_ids`` are in use again, or left the tree."""
        for node in self._nodes_of(block_ids):
            if node.is_ordered and not self._is_unused_at_end(node):
                self._leaves.remove(node)

    def _is_unused_at_end(self, node: PrefixNode) -> bool:
        is_cached = self._pool.is_one_cached
        return all(row[-1] == HOLE or is_cached(row[-1]) for row in node.rows)

    def _nodes_of(self, block_ids: BlockIds) -> Iterator[PrefixNode]:
        indices = self._index_of_block[block_ids]
        first = int(indices[0])
        if (indices == first).all():
            found = [first]
        else:
            found = dict.fromkeys(indices[np.append(True, indices[1:] != indices[:-1])].tolist())
        for index in found:
            node = self._nodes[index] if index != _NOWHERE else None
            if node is not None:
                yield node

    # Evicting

    def evict(self, count: int, recycle: Callable[[BlockIds], None]) -> None:
        """Take ``count`` of the CACHED blocks out, the longest unused first.

        With several groups it may be a few more: a column goes as a whole. A child goes before its
        parent is considered.

        Args:
            count: At most the number of CACHED blocks.
            recycle: Called once with all that the order of eviction gave, also if something fails
                midway. Blocks that follow a prefix in use are a rare second call.
        """
        self._version += 1
        taken = array("q")
        try:
            while len(taken) < count and self._take_oldest(count - len(taken), taken):
                pass
        finally:
            self._recycle(taken, recycle)
        missing = count - len(taken)
        while missing > 0 and (num_freed := self._take_inner(recycle)):
            missing -= num_freed

    def _recycle(self, taken: "array[int]", recycle: Callable[[BlockIds], None]) -> None:
        if taken:
            block_ids = np.array(taken, dtype=np.int64)
            self._index_of_block[block_ids] = _NOWHERE
            recycle(block_ids)

    def _take_oldest(self, count: int, taken: "array[int]") -> bool:
        """Move at most about ``count`` blocks of one node to ``taken``; False: none is unused."""
        if self._windows and (node := next(iter(self._window_order), None)) is not None:
            leaf = self._leaves.pop(older_than=node.window_used)
            if leaf is None:
                self._take_windows(node, count, taken)
                return True
        else:
            leaf = self._leaves.pop()
        if leaf is None:
            return False
        self._take_leaf(leaf, count, taken)
        return True

    def _take_leaf(self, leaf: PrefixNode, count: int, taken: "array[int]") -> None:
        """Take whole columns from the end of ``leaf``, as far as all of a column is CACHED."""
        unused = self._count_unused(leaf, count)
        if len(leaf.rows) == 1:
            num_columns = min(unused, count)
            taken.extend(leaf.rows[0][: -num_columns - 1 : -1])
        else:
            rows = np.array([row[-unused:] for row in leaf.rows], dtype=np.int64)
            num_present = np.cumsum((rows != HOLE).sum(axis=0)[::-1])
            num_columns = min(unused, int(np.searchsorted(num_present, count)) + 1)
            taken.extend(leaf.blocks_from(leaf.end - num_columns).tolist())
        if num_columns == leaf.num_columns:
            self._detach(leaf)
            return
        leaf.truncate(leaf.end - num_columns)
        if num_columns < unused:
            self._leaves.put_back(leaf)

    def _count_unused(self, leaf: PrefixNode, count: int) -> int:
        """Columns at the end of ``leaf`` that are CACHED as a whole; the last one is.

        Where they are many, more than ``count`` and how many more does not matter.
        """
        if leaf.num_columns == 1:
            return 1
        if count < _FEW and len(leaf.rows) == 1:
            is_cached = self._pool.is_one_cached
            row = leaf.rows[0]
            most = min(count + 1, len(row))
            return next((at for at in range(1, most) if not is_cached(row[-1 - at])), most)
        rows = np.array(leaf.rows, dtype=np.int64)
        unused = ((rows == HOLE) | self._pool.is_cached(rows)).all(axis=0)[::-1]
        return len(unused) if unused.all() else int(unused.argmin())

    def _take_windows(self, node: PrefixNode, count: int, taken: "array[int]") -> None:
        """Take blocks of groups with a window that no hit at the end of ``node`` needs."""
        spare = self._spare_in_windows(node)
        for row, column, block_id in spare[:count]:
            node.rows[row][column] = HOLE
            taken.append(block_id)
            self._index_of[block_id] = _NOWHERE
        if len(spare) <= count:
            del self._window_order[node]
        if self._is_all_windows and not node.children:
            self._trim(node)

    def _spare_in_windows(self, node: PrefixNode) -> list[tuple[int, int, int]]:
        """Return group, column and id of those blocks, the first columns first."""
        spare: list[tuple[int, int, int]] = []
        for reach in self._windows:
            row = node.rows[reach.index]
            # What a hit at a leaf's end needs goes with its columns: without it, none is useful.
            kept = range(0) if node.children else reach.live(node.end)
            spare += [
                (reach.index, column, block_id)
                for column, block_id in enumerate(row)
                if block_id != HOLE
                and node.start + column not in kept
                and self._pool.is_one_cached(block_id)
            ]
        return sorted(spare, key=lambda found: found[1])

    def _trim(self, node: PrefixNode) -> None:
        """Drop columns of holes from the end of a leaf, and a leaf that has no other."""
        end = node.end
        while end > node.start and all(row[end - 1 - node.start] == HOLE for row in node.rows):
            end -= 1
        self._leaves.remove(node)
        if end == node.start:
            self._detach(node)
            return
        if end < node.end:
            node.truncate(end)
        self._expose(node)

    def _expose(self, node: PrefixNode) -> None:
        if self._is_unused_at_end(node):
            self._leaves.expose(node)

    def _take_inner(self, recycle: Callable[[BlockIds], None]) -> int:
        """Give up the longest unused prefix although something behind it is in use.

        What is in use stays with its owner; only the tree forgets it, with all that follows. This
        happens where two requests computed one prefix at one time, and the one whose copy was not
        kept outlives the other.

        Returns:
            CACHED blocks that were recycled; 0 if there is none left.
        """
        cached = self._pool.cached()
        nodes = list(self._nodes_of(cached)) if len(cached) else []
        if not nodes:
            return 0
        node = min(nodes, key=lambda node: node.last_used)
        rows = np.array(node.rows, dtype=np.int64)
        unused = ((rows != HOLE) & self._pool.is_cached(rows)).any(axis=0)
        block_ids = self._cut(node, node.start + int(unused.argmax()))
        num_cached = int(self._pool.is_cached(block_ids).sum())
        self._recycle(array("q", block_ids.tolist()), recycle)
        return num_cached

    def _cut(self, node: PrefixNode, index: int) -> BlockIds:
        """Take all from ``index`` of ``node`` on out of the tree, and return the blocks."""
        found = [node.blocks_from(index)]
        below = list(node.children.values())
        while below:
            child = below.pop()
            found.append(child.blocks_from(child.start))
            below += child.children.values()
            self._leave(child)
        node.children.clear()
        self._leaves.remove(node)
        if index == node.start:
            self._detach(node)
        else:
            node.truncate(index)
            self._expose(node)
        return np.concatenate(found)

    def forget_all(self) -> BlockIds:
        """Empty the tree; return the blocks, which the caller takes the hold of."""
        block_ids = np.flatnonzero(self._index_of_block != _NOWHERE)
        for node in self._nodes:
            if node is not None:
                node.index = _NOWHERE
        self._version += 1
        self._roots.clear()
        self._nodes.clear()
        self._free_indices.clear()
        self._leaves.clear()
        self._window_order.clear()
        self._index_of_block[:] = _NOWHERE
        return block_ids

    # Nodes in and out

    def _enter(self, node: PrefixNode) -> None:
        if self._free_indices:
            node.index = self._free_indices.pop()
            self._nodes[node.index] = node
        else:
            node.index = len(self._nodes)
            self._nodes.append(node)

    def _leave(self, node: PrefixNode) -> None:
        self._leaves.remove(node)
        self._window_order.pop(node, None)
        self._nodes[node.index] = None
        self._free_indices.append(node.index)
        node.index = _NOWHERE

    def _detach(self, node: PrefixNode) -> None:
        """Take a node without children out; its parent may be a leaf now."""
        self._leave(node)
        parent = node.parent
        if parent is None:
            return
        del parent.children[node.key]
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[parent.key]
        elif self._is_all_windows:
            self._trim(parent)
        else:
            self._expose(parent)

    def _map(self, block_ids: "array[int]", index: int) -> None:
        if len(block_ids) == 1:
            self._index_of[block_ids[0]] = index
        else:
            self._index_of_block[np.array(block_ids, dtype=np.int64)] = index

    def _without_holes(self, row: "array[int]") -> "array[int]":
        if not self._windows or HOLE not in row:
            return row
        return array("q", [block_id for block_id in row if block_id != HOLE])

    # Checking

    @property
    def block_ids(self) -> BlockIds:
        """All blocks that can be hit; the work is proportional to the pool."""
        return np.flatnonzero(self._index_of_block != _NOWHERE)

    def check_invariants(self) -> None:
        """Assert the invariants above."""
        self._leaves.check_invariants()
        seen: set[int] = set()
        nodes = [node for node in self._nodes if node is not None]
        for node in nodes:
            for row in node.rows:
                blocks = [block_id for block_id in row if block_id != HOLE]
                assert seen.isdisjoint(blocks), "a block is in two columns"
                assert all(self._index_of[block_id] == node.index for block_id in blocks)
                seen.update(blocks)
                assert len(row) == node.num_columns > 0
            assert node.parent is not None
            assert node.parent.children[node.key] is node, "a node's parent does not know it"
            assert node.start == node.parent.end, "a run has a gap"
            assert bytes(node.tokens[: len(node.key)]) == node.key
            is_unused = not node.children and self._is_unused_at_end(node)
            assert node.is_ordered == is_unused, "a leaf is lost, or one in use is not"
            if self._windows and self._spare_in_windows(node):
                assert node in self._window_order, "a block behind a window is lost"
        assert seen == set(self.block_ids.tolist()), "a block is mapped and in no column"


def _ids_along(path: list[PrefixNode], group: int, indices: range) -> BlockIds:
    """Return the ids of ``group`` at ``indices`` along ``path``, holes included."""
    parts = [
        node.row(group, max(node.start, indices.start), min(node.end, indices.stop))
        for node in path
        if node.start < indices.stop and node.end > indices.start
    ]
    return parts[0] if len(parts) == 1 else np.concatenate((*parts, np.empty(0, dtype=np.int64)))
