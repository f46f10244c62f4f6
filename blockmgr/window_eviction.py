"""Blocks of groups with a window that no hit at the end of their prefix needs."""

from array import array
from collections.abc import Sequence

import numpy as np

from blockmgr.block_table import HOLE
from blockmgr.pool import BlockPool
from blockmgr.prefix_node import PrefixNode
from blockmgr.prefix_nodes import PrefixNodes
from blockmgr.window import WindowReach


class WindowEviction:
    """Takes such blocks out one by one and leaves holes, the longest unused node first.

    A hit needs the sinks, and the window's reach at its end. Sinks, and what a leaf's own end
    needs, are not spare: they go with the columns, since without them no hit is useful.

    Invariant (``check_invariants``): a node with a spare CACHED block is in the order.
    """

    def __init__(self, nodes: PrefixNodes, pool: BlockPool, windows: Sequence[WindowReach]) -> None:
        self._nodes = nodes
        self._pool = pool
        self._windows = windows
        self._order: dict[PrefixNode, None] = {}
        """Nodes that may have spare blocks, the longest unused first."""

    def was_used(self, node: PrefixNode, time: int) -> None:
        """Blocks of ``node`` got out of use at ``time``."""
        if self._windows:
            node.window_used = time
            self._order.pop(node, None)
            self._order[node] = None

    def may_have(self, node: PrefixNode) -> None:
        """``node`` may have spare blocks that it did not have."""
        if self._windows:
            self._order.setdefault(node)

    def discard(self, node: PrefixNode) -> None:
        """``node`` left the tree."""
        self._order.pop(node, None)

    def clear(self) -> None:
        """The tree is empty."""
        self._order.clear()

    def oldest(self) -> PrefixNode | None:
        """Return the node that is unused longest, of those that may have a spare block."""
        return next(iter(self._order), None)

    def take(self, node: PrefixNode, count: int, taken: "array[int]") -> None:
        """Move at most ``count`` spare blocks of ``node`` to ``taken``, the first columns first."""
        spare = self._spare(node)
        for group, column, block_id in spare[:count]:
            node.rows[group][column] = HOLE
            taken.append(block_id)
        self._nodes.was_changed(node)
        self._nodes.unmap(np.array([block_id for *_, block_id in spare[:count]], dtype=np.int64))
        if len(spare) <= count:
            del self._order[node]

    def _spare(self, node: PrefixNode) -> list[tuple[int, int, int]]:
        """Return group, column and id of the spare blocks, the first columns first."""
        spare: list[tuple[int, int, int]] = []
        for reach in self._windows:
            kept = reach.live(node.end) if self._nodes.is_leaf(node) else range(0)
            spare += [
                (reach.index, column, block_id)
                for column, block_id in enumerate(node.rows[reach.index])
                if block_id != HOLE
                and node.start + column >= reach.num_sinks
                and node.start + column not in kept
                and self._pool.is_one_cached(block_id)
            ]
        return sorted(spare, key=lambda found: found[1])

    def check_invariants(self) -> None:
        """Assert the invariant above."""
        for node in self._nodes.all():
            assert node in self._order or not self._spare(node), "a block behind a window is lost"
