"""The nodes of the prefix tree, and in which of them each block is."""

from array import array
from collections.abc import Iterator

import numpy as np

from blockmgr.block_table import HOLE
from blockmgr.free_queue import BlockIds
from blockmgr.prefix_node import NO_INDEX, PrefixNode


class PrefixNodes:
    """Roots by namespace, nodes by index, and the node of each block.

    Invariants (``check_invariants``):
        * a block is in at most one column, in the node that it is mapped to;
        * the children of a node differ in their first block; only a root has no column.
    """

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self._num_groups = num_groups
        self._roots: dict[bytes, PrefixNode] = {}
        self._nodes: list[PrefixNode | None] = []
        self._free_indices: list[int] = []
        # Two faces of one array: Python's for single blocks, numpy's for batches.
        self._index_of = array("q", [NO_INDEX]) * num_blocks
        self._index_of_block = np.frombuffer(self._index_of, dtype=np.int64)

    def __len__(self) -> int:
        """Nodes that have a column."""
        return len(self._nodes) - len(self._free_indices)

    def root(self, namespace: bytes) -> PrefixNode | None:
        """Return the root of what was kept in ``namespace``."""
        return self._roots.get(namespace)

    def make_root(self, namespace: bytes) -> PrefixNode:
        """Return the root of ``namespace``, made where there was none."""
        root = self._roots.get(namespace)
        if root is None:
            root = PrefixNode(None, 0, bytearray(), [array("q") for _ in range(self._num_groups)])
            root.key = namespace
            self._roots[namespace] = root
        return root

    def add(self, node: PrefixNode) -> None:
        """Number ``node``, which its parent knows already."""
        if self._free_indices:
            node.index = self._free_indices.pop()
            self._nodes[node.index] = node
        else:
            node.index = len(self._nodes)
            self._nodes.append(node)

    def remove(self, node: PrefixNode) -> None:
        """Take ``node`` out; its parent and its blocks are the caller's matter."""
        self._nodes[node.index] = None
        self._free_indices.append(node.index)
        node.index = NO_INDEX

    def detach(self, node: PrefixNode) -> PrefixNode | None:
        """Take ``node``, which has no children, out; return its parent if that is a leaf now."""
        self.remove(node)
        parent = node.parent
        if parent is None:
            return None
        del parent.children[node.key]
        if parent.children:
            return None
        if parent.parent is None:
            del self._roots[parent.key]
            return None
        return parent

    def clear(self) -> BlockIds:
        """Forget all nodes; return the blocks that were in them."""
        block_ids = self.block_ids
        for node in self._nodes:
            if node is not None:
                node.index = NO_INDEX
        self._roots.clear()
        self._nodes.clear()
        self._free_indices.clear()
        self._index_of_block[:] = NO_INDEX
        return block_ids

    # Blocks

    @property
    def block_ids(self) -> BlockIds:
        """All blocks in columns; the work is proportional to the pool."""
        return np.flatnonzero(self._index_of_block != NO_INDEX)

    def map(self, block_ids: "array[int]", node: PrefixNode) -> None:
        """Note that ``block_ids`` are in ``node``."""
        if len(block_ids) == 1:
            self._index_of[block_ids[0]] = node.index
        else:
            self._index_of_block[np.array(block_ids, dtype=np.int64)] = node.index

    def unmap(self, block_ids: BlockIds) -> None:
        """Note that ``block_ids`` are in no node."""
        self._index_of_block[block_ids] = NO_INDEX

    def nodes_of(self, block_ids: BlockIds) -> Iterator[PrefixNode]:
        """Return the nodes that ``block_ids`` (at least one) are in, each once."""
        indices = self._index_of_block[block_ids]
        first = int(indices[0])
        if (indices == first).all():
            found = [first]
        else:
            starts = np.append(True, indices[1:] != indices[:-1])
            found = list(dict.fromkeys(indices[starts].tolist()))
        for index in found:
            node = self._nodes[index] if index != NO_INDEX else None
            if node is not None:
                yield node

    # Checking

    def all(self) -> list[PrefixNode]:
        """Return every node that has a column."""
        return [node for node in self._nodes if node is not None]

    def check_invariants(self) -> None:
        """Assert the invariants above."""
        seen: set[int] = set()
        for node in self.all():
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
        assert seen == set(self.block_ids.tolist()), "a block is mapped and in no column"
        assert all(root.children for root in self._roots.values()), "a root keeps nothing"
