"""The nodes of the prefix tree, and in which of them each block is."""

from array import array
from collections.abc import Iterator

import numpy as np

from blockmgr.block_table import HOLE
from blockmgr.free_queue import BlockIds
from blockmgr.node_array import Indices, NodeArray
from blockmgr.prefix_node import NO_INDEX, PrefixNode


class PrefixNodes:
    """Roots by namespace, nodes by index, and the node of each block.

    What evicting thousands of leaves needs to know of each is in arrays by the node's index, so
    that a batch touches no node. The objects of such leaves are dropped later, when their index is
    used again: until then their parent's ``children`` still has them, and ``child`` sees through.

    Invariants (``check_invariants``):
        * a block is in at most one column, in the node that it is mapped to;
        * the children of a node differ in their first block; only a root has no column;
        * the arrays say what the nodes say.
    """

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self._num_groups = num_groups
        self._roots: dict[bytes, PrefixNode] = {}
        self._nodes: list[PrefixNode] = []
        self._free_indices: list[int] = []
        self._node_of_block = NodeArray(num_blocks, NO_INDEX)
        self.parent = NodeArray(1024, NO_INDEX)
        """Index of the parent; a root has none."""
        self.num_children = NodeArray(1024, 0)
        self.num_columns = NodeArray(1024, 0)
        """0: a root, or no node."""
        self.last_block = NodeArray(1024, HOLE)
        """In the first group."""
        self._seen_at = NodeArray(1024, 0)
        """Scratch of ``distinct``."""
        self._columns = (
            self.parent,
            self.num_children,
            self.num_columns,
            self.last_block,
            self._seen_at,
        )

    def __len__(self) -> int:
        """Nodes that have a column."""
        return len(self._nodes) - len(self._free_indices) - len(self._roots)

    def __getitem__(self, index: int) -> PrefixNode:
        return self._nodes[index]

    # Asking

    @property
    def num_indices(self) -> int:
        """Greater than every index, of roots too."""
        return len(self._nodes)

    def is_alive(self, node: PrefixNode) -> bool:
        """Whether ``node`` has a column and is in the tree."""
        index = node.index
        return index >= 0 and self.num_columns.one[index] > 0 and self._nodes[index] is node

    def is_leaf(self, node: PrefixNode) -> bool:
        """Whether ``node``, which is in the tree, has no child."""
        return not self.num_children.one[node.index]

    def child(self, node: PrefixNode, key: bytes) -> PrefixNode | None:
        """Return the child of ``node`` whose first block is ``key``."""
        child = node.children.get(key)
        return child if child is not None and self.is_alive(child) else None

    def children(self, node: PrefixNode) -> list[PrefixNode]:
        """Return all children of ``node``."""
        return [child for child in node.children.values() if self.is_alive(child)]

    def root(self, namespace: bytes) -> PrefixNode | None:
        """Return the root of what was kept in ``namespace``."""
        return self._roots.get(namespace)

    def all(self) -> list[PrefixNode]:
        """Return every node that has a column."""
        return [node for node in self._nodes if self.is_alive(node)]

    # Changing

    def make_root(self, namespace: bytes) -> PrefixNode:
        """Return the root of ``namespace``, made where there was none."""
        root = self._roots.get(namespace)
        if root is None:
            root = PrefixNode(None, 0, bytearray(), [array("q") for _ in range(self._num_groups)])
            root.key = namespace
            self._roots[namespace] = root
            self._number(root)
        return root

    def add(self, node: PrefixNode, key: bytes) -> None:
        """Put ``node``, whose first block is ``key``, under its parent."""
        parent = node.parent
        node.key = key
        if parent is not None:
            parent.children[key] = node
            self.num_children.one[parent.index] += 1
        self._number(node)

    def split(self, node: PrefixNode, index: int, block_nbytes: int) -> PrefixNode:
        """Give the run of ``node`` up to ``index`` a node of its own in front, and return that."""
        upper = node.split(index, block_nbytes)
        self._number(upper)
        self.num_children.one[upper.index] = 1
        self.parent.one[node.index] = upper.index
        self.was_changed(node)
        return upper

    def was_changed(self, node: PrefixNode) -> None:
        """``node`` has other columns than before."""
        self.num_columns.one[node.index] = node.num_columns
        self.last_block.one[node.index] = node.rows[0][-1]

    def detach(self, node: PrefixNode) -> PrefixNode | None:
        """Take ``node``, which has no child, out; return its parent if that is a leaf now."""
        parent = node.parent
        self.remove(node)
        if parent is None:
            return None
        del parent.children[node.key]
        self.num_children.one[parent.index] -= 1
        return self._if_leaf(parent.index)

    def drop_if_empty(self, node: PrefixNode) -> None:
        """Take ``node`` out if it is a root without a child."""
        if node.parent is None and not self.num_children.one[node.index]:
            self._if_leaf(node.index)

    def detach_all(self, nodes: Indices) -> list[PrefixNode]:
        """Take childless nodes, or such whose children are among them, out.

        Returns:
            Their parents that are leaves now.
        """
        self.num_columns.many[nodes] = 0
        parents = self.parent.many[nodes]
        np.subtract.at(self.num_children.many, parents, 1)
        self._free_indices += nodes.tolist()
        emptied = self.distinct(parents[self.num_children.many[parents] == 0])
        is_left = (self.num_columns.many[emptied] > 0) | (self.parent.many[emptied] == NO_INDEX)
        emptied = emptied[is_left]  # not one of ``nodes``
        leaves = [self._if_leaf(index) for index in emptied.tolist()]
        return [node for node in leaves if node is not None]

    def distinct(self, nodes: Indices) -> Indices:
        """Return each of ``nodes`` once: without the sort that ``np.unique`` does."""
        at = np.arange(len(nodes))
        self._seen_at.many[nodes] = at
        return nodes[self._seen_at.many[nodes] == at]

    def _if_leaf(self, index: int) -> PrefixNode | None:
        """Return the node at ``index`` if it is a leaf; a root without a child goes."""
        if self.num_children.one[index]:
            return None
        node = self._nodes[index]
        if self.num_columns.one[index]:
            return node
        if node.parent is None and self._roots.get(node.key) is node:
            del self._roots[node.key]
            self.remove(node)
        return None

    def remove(self, node: PrefixNode) -> None:
        """Free the index of ``node``; its parent and its blocks are the caller's matter."""
        self.num_columns.one[node.index] = 0
        self._free_indices.append(node.index)

    def clear(self) -> BlockIds:
        """Forget all nodes; return the blocks that were in them."""
        block_ids = self.block_ids
        self._roots.clear()
        self._nodes.clear()
        self._free_indices.clear()
        self.num_columns.many[:] = 0
        self._node_of_block.many[:] = NO_INDEX
        return block_ids

    def _number(self, node: PrefixNode) -> None:
        if self._free_indices:
            node.index = self._free_indices.pop()
            self._forget(self._nodes[node.index])
            self._nodes[node.index] = node
        else:
            node.index = len(self._nodes)
            self._nodes.append(node)
            for column in self._columns:
                column.reserve(node.index + 1)
        self.num_children.one[node.index] = 0
        self.parent.one[node.index] = NO_INDEX
        if node.parent is not None:
            self.parent.one[node.index] = node.parent.index
            self.was_changed(node)

    def _forget(self, node: PrefixNode) -> None:
        """Drop what a batch left of ``node``."""
        if node.parent is not None and node.parent.children.get(node.key) is node:
            del node.parent.children[node.key]
        node.index = NO_INDEX

    # Blocks

    @property
    def block_ids(self) -> BlockIds:
        """All blocks in columns; the work is proportional to the pool."""
        return np.flatnonzero(self._node_of_block.many != NO_INDEX)

    def map(self, block_ids: "array[int]", node: PrefixNode) -> None:
        """Note that ``block_ids`` are in ``node``."""
        if len(block_ids) == 1:
            self._node_of_block.one[block_ids[0]] = node.index
        else:
            self._node_of_block.many[np.frombuffer(block_ids, dtype=np.int64)] = node.index

    def unmap(self, block_ids: BlockIds) -> None:
        """Note that ``block_ids`` are in no node."""
        self._node_of_block.many[block_ids] = NO_INDEX

    def unmap_one(self, block_id: int) -> None:
        """Do the same for a single block."""
        self._node_of_block.one[block_id] = NO_INDEX

    def nodes_of(self, block_ids: BlockIds) -> Iterator[PrefixNode]:
        """Return the nodes that ``block_ids`` (at least one) are in, each once."""
        indices = self._node_of_block.many[block_ids]
        found = [int(indices[0])]
        starts = (indices[1:] != indices[:-1]).nonzero()[0]
        if len(starts):
            found = list(dict.fromkeys(found + indices[starts + 1].tolist()))
        for index in found:
            if index != NO_INDEX:
                yield self._nodes[index]

    # Checking

    def check_invariants(self) -> None:
        """Assert the invariants above."""
        seen: set[int] = set()
        nodes = self.all()
        assert len(nodes) == len(self), "the number of nodes is wrong"
        for node in nodes:
            for row in node.rows:
                blocks = [block_id for block_id in row if block_id != HOLE]
                assert seen.isdisjoint(blocks), "a block is in two columns"
                assert all(self._node_of_block.one[block_id] == node.index for block_id in blocks)
                seen.update(blocks)
                assert len(row) == node.num_columns > 0
            parent = node.parent
            assert parent is not None
            assert parent.children[node.key] is node, "a node's parent does not know it"
            assert node.start == parent.end, "a run has a gap"
            assert bytes(node.tokens[: len(node.key)]) == node.key
            assert self.parent.one[node.index] == parent.index
            is_root = parent.parent is None and self._roots.get(parent.key) is parent
            assert is_root or self.is_alive(parent), "a node outlived its parent"
            assert self.num_columns.one[node.index] == node.num_columns
            assert self.last_block.one[node.index] == node.rows[0][-1]
        for node in [*nodes, *self._roots.values()]:
            assert self.num_children.one[node.index] == len(self.children(node))
        assert all(self.children(root) for root in self._roots.values()), "a root keeps nothing"
        assert seen == set(self.block_ids.tolist()), "a block is mapped and in no column"
