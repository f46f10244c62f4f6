"""A prefix tree with a node per block and a heap of leaves: what our eviction is measured against.

The common design of public radix caches, as FastDeploy's ``PrefixCacheManager`` has it: leaves that
nobody uses are node objects in a ``heapq``, ordered by (last use, depth) through ``__lt__``, beside
a set that says which nodes the heap has; evicting pops one leaf at a time, gives that node's block
back to a free list that is a heap of ids, and pushes the parent once its last child has left.
Logging and node ids are left out, which makes it faster than the original.
"""

import heapq
from collections.abc import Hashable, Sequence
from typing import Self


class Node:
    """One block of a prefix."""

    __slots__ = ("block_id", "children", "depth", "key", "last_used", "num_users", "parent")

    def __init__(self, key: Hashable, parent: Self | None, block_id: int, depth: int) -> None:
        self.key = key
        self.parent = parent
        self.block_id = block_id
        self.depth = depth
        self.children: dict[Hashable, Self] = {}
        self.num_users = 0
        self.last_used = 0

    def __lt__(self, other: Self) -> bool:
        if self.last_used != other.last_used:
            return self.last_used < other.last_used
        return self.depth > other.depth


class HeapPerNodeCache:
    """A pool of blocks of which some are cached, one tree node each.

    Invariants (``check_invariants``): the heap and the set hold the same nodes, which are exactly
    the leaves that nobody uses; every block is free or in the tree, once.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._root = Node(None, None, -1, 0)
        self._free = list(range(num_blocks))
        self._heap: list[Node] = []
        self._heaped: set[Node] = set()
        self._now = 0

    @property
    def num_free(self) -> int:
        """Blocks that are not cached."""
        return len(self._free)

    def insert(self, path: Sequence[Hashable]) -> Node:
        """Use the nodes of ``path``, made where they are new; return the last one."""
        node = self._root
        for key in path:
            child = node.children.get(key)
            if child is None:
                (block_id,) = self.allocate(1)
                child = Node(key, node, block_id, node.depth + 1)
                self._make_inner(node)
                node.children[key] = child
            child.num_users += 1
            node = child
        return node

    def release(self, last: Node) -> None:
        """Stop using the path that ends at ``last``; its leaf becomes evictable."""
        self._now += 1
        self._make_inner(last)  # its place in the heap depends on the time of its last use
        node: Node | None = last
        while node is not None and node.parent is not None:
            node.num_users -= 1
            node.last_used = self._now
            node = node.parent
        self._offer(last)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, evicting as many as are missing."""
        if count > len(self._free):
            self.evict(count - len(self._free))
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Return blocks that ``allocate`` took."""
        for block_id in block_ids:
            heapq.heappush(self._free, block_id)

    def evict(self, count: int) -> list[int]:
        """Free up to ``count`` blocks of leaves, the least recently used first; return them."""
        evicted: list[int] = []
        busy: list[Node] = []
        while self._heap and len(evicted) < count:
            node = heapq.heappop(self._heap)
            self._heaped.remove(node)
            if node.num_users:
                busy.append(node)
                continue
            heapq.heappush(self._free, node.block_id)
            evicted.append(node.block_id)
            parent = node.parent
            if parent is not None:
                del parent.children[node.key]
                self._offer(parent)
        for node in busy:
            heapq.heappush(self._heap, node)
            self._heaped.add(node)
        return evicted

    def check_invariants(self) -> None:
        """Assert the invariants above, for a tree that nobody uses just now."""
        nodes: list[Node] = []
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            nodes.append(node)
            stack += node.children.values()
        leaves = {node for node in nodes if not node.children and not node.num_users}
        assert len(self._heap) == len(self._heaped), "a node is in the heap twice"
        assert set(self._heap) == self._heaped == leaves, "heap, set and leaves disagree"
        held = sorted([*self._free, *(node.block_id for node in nodes)])
        assert held == list(range(self.num_blocks)), "a block was lost, or is there twice"

    def _offer(self, node: Node) -> None:
        is_leaf = node.parent is not None and not node.children
        if is_leaf and not node.num_users and node not in self._heaped:
            self._heaped.add(node)
            heapq.heappush(self._heap, node)

    def _make_inner(self, node: Node) -> None:
        if node in self._heaped:
            self._heaped.remove(node)
            self._heap.remove(node)
            heapq.heapify(self._heap)
