"""Which kept blocks nobody uses, and in what order they are given up."""

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from blockmgr.block_table import HOLE
from blockmgr.free_queue import BlockIds
from blockmgr.leaf_order import LeafOrder
from blockmgr.node_array import Indices, NodeArray
from blockmgr.pool import BlockPool
from blockmgr.prefix_node import PrefixNode
from blockmgr.prefix_nodes import PrefixNodes
from blockmgr.window import WindowReach
from blockmgr.window_eviction import WindowEviction

_FEW = 16
Recycle = Callable[[BlockIds], None]
"""Takes the tree's hold of a batch of blocks."""


class PrefixEviction:
    """Takes CACHED blocks out of the prefix tree, the longest unused first.

        leaves    whole columns, from the end of a leaf towards the root
        windows   single blocks, see ``WindowEviction``
        inner     last, a prefix in front of something that is in use

    The pool tells which blocks got out of use (``became_cached``) and into use again
    (``left_cached``); nothing else moves a node in the order.

    Invariant (``check_invariants``): a leaf is in the order exactly if every block of its last
    column is CACHED; a hole counts as such.
    """

    def __init__(
        self,
        nodes: PrefixNodes,
        pool: BlockPool,
        windows: Sequence[WindowReach],
        *,
        num_groups: int,
    ) -> None:
        self._nodes = nodes
        self._pool = pool
        self._is_one_row = num_groups == 1 and not windows
        """Whether a column is always one block: then a batch needs no look at the columns."""
        self._windows = WindowEviction(nodes, pool, windows)
        self.is_all_windows = len(windows) == num_groups
        """Whether no group keeps a column alive by itself."""
        self._leaves = LeafOrder()
        self._num_going = NodeArray(1024, 0)
        """Scratch: children of a node that a batch takes."""
        self._latest = NodeArray(1024, 0)
        """Scratch: when the last of them was used."""
        self._time = 0

    # What happens to nodes

    def became_cached(self, block_ids: BlockIds) -> None:
        """Nobody uses ``block_ids`` any more, as of now."""
        self._time += 1
        for node in self._nodes.nodes_of(block_ids):
            self._leaves.set_time(node.index, self._time)
            self._windows.was_used(node, self._time)
            if self._nodes.is_leaf(node) and self._is_unused_at_end(node):
                self._leaves.add(node.index)

    def left_cached(self, block_ids: BlockIds) -> None:
        """``block_ids`` are in use again, or left the tree."""
        for node in self._nodes.nodes_of(block_ids):
            if self._leaves.contains(node.index) and not self._is_unused_at_end(node):
                self._leaves.remove(node.index)

    def was_added(self, node: PrefixNode) -> None:
        """``node`` is new, and its blocks are in use."""
        self._leaves.set_time(node.index, self._time)
        self._windows.may_have(node)

    def grew(self, node: PrefixNode) -> None:
        """``node`` has a child now, or more columns, whose blocks are in use."""
        if self._nodes.is_alive(node):
            self._leaves.remove(node.index)
            self._windows.may_have(node)

    def was_filled(self, node: PrefixNode) -> None:
        """Holes of ``node`` have blocks now, which are in use."""
        if self._leaves.contains(node.index) and not self._is_unused_at_end(node):
            self._leaves.remove(node.index)

    def was_split(self, node: PrefixNode, upper: PrefixNode) -> None:
        """``upper`` is a new node, in front of ``node``, from which it was split."""
        self.was_added(upper)
        self._leaves.set_time(upper.index, self._leaves.time_of(node.index))

    def clear(self) -> None:
        """The tree is empty."""
        self._leaves.clear()
        self._windows.clear()

    # Taking blocks out

    def evict(self, count: int, recycle: Recycle) -> None:
        """Take ``count`` of the CACHED blocks out.

        With several groups it may be a few more: a column goes as a whole. A child goes before its
        parent is considered.

        Args:
            count: At most the number of CACHED blocks.
            recycle: Called once with all that the order gave, also if something fails midway.
                Blocks in front of a prefix in use are a rare second call.
        """
        taken = array("q")
        try:
            while len(taken) < count and self._take_oldest(count - len(taken), taken):
                pass
        finally:
            self._recycle(np.array(taken, dtype=np.int64), recycle)
        missing = count - len(taken)
        while missing > 0 and (num_freed := self._take_inner(missing, recycle)):
            missing -= num_freed

    def evict_one(self) -> int | None:
        """Take the one block that is unused longest out of the tree, and return it.

        None, without a trace: it is not that simple, ``evict`` must look.
        """
        first = self._leaves.first() if self._is_one_row else None
        if first is None:
            return None
        leaf = self._nodes[first]
        row = leaf.rows[0]
        block_id = row[-1]
        if len(row) == 1:
            self._detach(leaf)
        else:
            self._truncate(leaf, leaf.end - 1)
            if not self._pool.is_one_cached(row[-1]):
                self._leaves.remove(first)
        self._nodes.unmap_one(block_id)
        return block_id

    def _recycle(self, block_ids: BlockIds, recycle: Recycle) -> None:
        if len(block_ids):
            self._nodes.unmap(block_ids)
            recycle(block_ids)

    def _take_oldest(self, count: int, taken: "array[int]") -> bool:
        """Move at most about ``count`` blocks to ``taken``; False: none is unused."""
        first = self._leaves.first()
        leaf = None if first is None else self._nodes[first]
        node = self._windows.oldest()
        if node is not None and (
            leaf is None or node.window_used <= self._leaves.time_of(leaf.index)
        ):
            self._windows.take(node, count, taken)
            if self.is_all_windows and self._nodes.is_leaf(node):
                self._trim(node)
        elif leaf is None:
            return False
        elif leaf.num_columns > 1 or not self._is_one_row or count == 1:
            self._take_leaf(leaf, count, taken)
        else:
            self._take_small_leaves(count, taken)
        return True

    # Leaves

    def _take_leaf(self, leaf: PrefixNode, count: int, taken: "array[int]") -> None:
        """Take whole columns from the end of ``leaf``, as far as all of a column is CACHED."""
        unused = self._count_unused(leaf, count)
        if self._is_one_row:
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
        self._truncate(leaf, leaf.end - num_columns)
        if num_columns == unused:
            self._leaves.remove(leaf.index)

    def _take_small_leaves(self, count: int, taken: "array[int]") -> None:
        """Take leaves of one column that are the oldest, and the parents that this exposes."""
        for scratch in (self._num_going, self._latest):
            scratch.reserve(self._nodes.num_indices)
        oldest = self._leaves.oldest(count)
        is_small = self._nodes.num_columns.many[oldest] == 1
        if not is_small.all():
            oldest = oldest[: int(is_small.argmin())]
        going = self._with_exposed(oldest)[:count]
        taken.frombytes(self._nodes.last_block.many[going].tobytes())
        self._leaves.remove_all(going)
        for parent in self._nodes.detach_all(going):
            self._expose(parent)

    def _with_exposed(self, leaves: Indices) -> Indices:
        """Return ``leaves`` with the parents of one column that their going exposes, in order.

        Up to where a longer parent that is exposed would come, which is taken column by column. A
        parent that was not used since its child comes behind that child all the same: no part of
        the order, from its start on, leaves a child without its parent.
        """
        nodes, num_going, latest = self._nodes, self._num_going.many, self._latest.many
        found, times = [leaves], [self._leaves.times_of(leaves)]
        touched: list[Indices] = []
        first_long = np.iinfo(np.int64).max
        while len(found[-1]):
            parents = nodes.parent.many[found[-1]]
            np.add.at(num_going, parents, 1)
            np.maximum.at(latest, parents, times[-1])
            touched.append(parents)
            is_exposed = num_going[parents] == nodes.num_children.many[parents]
            parents = nodes.distinct(parents[is_exposed & (nodes.num_columns.many[parents] > 0)])
            parents = parents[self._pool.is_cached(nodes.last_block.many[parents])]
            parent_times = np.maximum(self._leaves.times_of(parents), latest[parents])
            is_small = nodes.num_columns.many[parents] == 1
            first_long = min(first_long, int(parent_times[~is_small].min(initial=first_long)))
            found.append(parents[is_small])
            times.append(parent_times[is_small])
        for indices in touched:
            num_going[indices] = 0
            latest[indices] = 0
        all_times = np.concatenate(times)
        # Stable: of one time, a child goes before its parent.
        order = np.argsort(all_times, kind="stable")
        order = order[: max(1, int(np.searchsorted(all_times[order], first_long, side="right")))]
        return np.concatenate(found)[order]

    def _count_unused(self, leaf: PrefixNode, count: int) -> int:
        """Columns at the end of ``leaf`` that are CACHED as a whole; the last one is.

        Where they are more than ``count``, how many more does not matter.
        """
        if leaf.num_columns == 1:
            return 1
        if count < _FEW and self._is_one_row:
            is_cached = self._pool.is_one_cached
            row = leaf.rows[0]
            most = min(count + 1, len(row))
            return next((at for at in range(1, most) if not is_cached(row[-1 - at])), most)
        rows = np.array(leaf.rows, dtype=np.int64)
        unused = ((rows == HOLE) | self._pool.is_cached(rows)).all(axis=0)[::-1]
        return len(unused) if unused.all() else int(unused.argmin())

    def _is_unused_at_end(self, node: PrefixNode) -> bool:
        is_cached = self._pool.is_one_cached
        return all(row[-1] == HOLE or is_cached(row[-1]) for row in node.rows)

    def _detach(self, node: PrefixNode) -> None:
        """Take a node without children out; its parent may be a leaf now."""
        self._leaves.remove(node.index)
        self._windows.discard(node)
        parent = self._nodes.detach(node)
        if parent is None:
            return
        if self.is_all_windows:
            self._trim(parent)
        else:
            self._expose(parent)

    def _truncate(self, node: PrefixNode, end: int) -> None:
        node.truncate(end)
        self._nodes.was_changed(node)

    def _expose(self, node: PrefixNode) -> None:
        if self._is_unused_at_end(node):
            self._leaves.expose(node.index)

    def _trim(self, node: PrefixNode) -> None:
        """Drop columns of holes from the end of a leaf, and a leaf that has no other."""
        end = node.end
        while end > node.start and all(row[end - 1 - node.start] == HOLE for row in node.rows):
            end -= 1
        self._leaves.remove(node.index)
        if end == node.start:
            self._detach(node)
            return
        if end < node.end:
            self._truncate(node, end)
        self._expose(node)

    # In front of what is in use

    def _take_inner(self, count: int, recycle: Recycle) -> int:
        """Give up the end of a prefix although something behind it is in use.

        What is in use stays with its owner; only the tree forgets it, with all that follows. This
        happens where a copy still reads the end of what nobody uses, and where two requests
        computed one prefix at one time and the one whose copy was not kept outlives the other.

        Returns:
            CACHED blocks that were recycled, ``count`` or a few more if the node has them; 0 if
            there is none left. The work is proportional to the pool.
        """
        cached = self._pool.cached()
        nodes = list(self._nodes.nodes_of(cached)) if len(cached) else []
        if not nodes:
            return 0
        node = min(nodes, key=lambda node: (self._leaves.time_of(node.index), -node.start))
        rows = np.array(node.rows, dtype=np.int64)
        num_cached = ((rows != HOLE) & self._pool.is_cached(rows)).sum(axis=0)
        from_end = np.cumsum(num_cached[::-1])
        enough = min(count, int(from_end[-1]))
        block_ids = self._cut(node, node.end - 1 - int(np.searchsorted(from_end, enough)))
        num_freed = int(self._pool.is_cached(block_ids).sum())
        self._recycle(block_ids, recycle)
        return num_freed

    def _cut(self, node: PrefixNode, index: int) -> BlockIds:
        """Take all from ``index`` of ``node`` on out of the tree, and return the blocks."""
        found = [node.blocks_from(index)]
        below = self._nodes.children(node)
        while below:
            child = below.pop()
            found.append(child.blocks_from(child.start))
            below += self._nodes.children(child)
            self._leaves.remove(child.index)
            self._windows.discard(child)
            self._nodes.remove(child)
        self._nodes.num_children.one[node.index] = 0
        self._leaves.remove(node.index)
        if index == node.start:
            self._detach(node)
        else:
            self._truncate(node, index)
            self._expose(node)
        return np.concatenate(found)

    def check_invariants(self) -> None:
        """Assert the invariant above, and that of the windows."""
        self._leaves.check_invariants()
        for node in self._nodes.all():
            is_unused = self._nodes.is_leaf(node) and self._is_unused_at_end(node)
            is_ordered = self._leaves.contains(node.index)
            assert is_ordered == is_unused, "a leaf is lost, or one in use is not"
        self._windows.check_invariants()
