"""Which unused content of the prefix tree goes first: leaves by recency."""

import heapq
import itertools
from collections import OrderedDict

from blockmgr.prefix_node import Place, PrefixNode


class LeafOrder:
    """The leaves whose last column nobody uses, the longest unused first.

    A leaf enters when its last column becomes evictable, which is also when it was last used: so
    a queue is in order by itself, and no heap is needed. Only a parent that lost its last child
    to an eviction comes with an older time; these wait in a heap beside it.

    Invariant (``check_invariants``): a node's ``place`` tells where it is, once.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[PrefixNode, None] = OrderedDict()
        self._exposed: list[tuple[int, int, PrefixNode]] = []
        self._serial_of: dict[PrefixNode, int] = {}
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._queue) + len(self._serial_of)

    def add(self, node: PrefixNode) -> None:
        """``node`` was used just now and is not any more."""
        if node.place is Place.EXPOSED:
            self.remove(node)
        node.place = Place.QUEUED
        self._queue[node] = None
        self._queue.move_to_end(node)

    def expose(self, node: PrefixNode) -> None:
        """``node``, not in here, lost its last child to an eviction."""
        node.place = Place.EXPOSED
        serial = self._serial_of[node] = next(self._serials)
        heapq.heappush(self._exposed, (node.last_used, serial, node))

    def put_back(self, node: PrefixNode) -> None:
        """``node`` came from ``pop``, and there is more of it: it is the oldest still."""
        node.place = Place.QUEUED
        self._queue[node] = None
        self._queue.move_to_end(node, last=False)

    def remove(self, node: PrefixNode) -> None:
        """``node`` is in use, has a child, or left the tree. Does nothing if it is not in here."""
        if node.place is Place.QUEUED:
            del self._queue[node]
        elif node.place is Place.EXPOSED:
            del self._serial_of[node]
            if len(self._exposed) > 2 * len(self._serial_of) + 64:
                self._exposed = [entry for entry in self._exposed if not self._is_stale(entry)]
                heapq.heapify(self._exposed)
        node.place = Place.NONE

    def pop(self, *, older_than: int | None = None) -> PrefixNode | None:
        """Remove and return the longest unused leaf; None if there is none that old."""
        self._skip_stale()
        oldest = next(iter(self._queue), None)
        if self._exposed and (oldest is None or self._exposed[0][0] <= oldest.last_used):
            oldest = self._exposed[0][2]
        if oldest is None or (older_than is not None and oldest.last_used >= older_than):
            return None
        self.remove(oldest)
        return oldest

    def clear(self) -> None:
        """Forget all nodes, which left the tree."""
        for node in [*self._queue, *self._serial_of]:
            node.place = Place.NONE
        self._queue.clear()
        self._exposed.clear()
        self._serial_of.clear()

    def _skip_stale(self) -> None:
        while self._exposed and self._is_stale(self._exposed[0]):
            heapq.heappop(self._exposed)

    def _is_stale(self, entry: tuple[int, int, PrefixNode]) -> bool:
        _, serial, node = entry
        return self._serial_of.get(node) != serial

    def check_invariants(self) -> None:
        """Assert the invariant above."""
        exposed = {node for *_, node in self._exposed}
        assert exposed >= self._serial_of.keys(), "an exposed node is lost"
        assert all(node.place is Place.EXPOSED for node in self._serial_of)
        assert all(node.place is Place.QUEUED for node in self._queue), "a queued node is lost"
        times = [node.last_used for node in self._queue]
        assert times == sorted(times), "the queue of leaves is not in order"
