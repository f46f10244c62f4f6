"""Which leaves of the prefix tree nobody uses, the longest unused first."""

import heapq
from typing import Final

import numpy as np

from blockmgr.node_array import Indices, NodeArray

_NOT_ORDERED: Final = -1
_EXPOSED: Final = -2
_FEW: Final = 16
_MANY: Final = 4096


class LeafOrder:
    """Node indices by the time of their last use.

    A leaf enters when its last column becomes evictable, which is also when it was last used: so
    a queue is in order by itself. Only a parent that lost its last child to an eviction comes with
    an older time; these wait in a heap beside it.

        queue   _ _ 7 _ 3 9 _ 4      place_of[3] is 4: entries elsewhere are stale
        heap    (time, 12), (time, 5)

    Invariants (``check_invariants``):
        * a node is at most once in here, where ``place_of`` says;
        * times do not decrease along the queue.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._queue = NodeArray(2 * capacity, 0)
        self._place = NodeArray(capacity, _NOT_ORDERED)
        self._time = NodeArray(capacity, 0)
        self._head = 0
        self._tail = 0
        self._exposed: list[tuple[int, int]] = []

    def contains(self, node: int) -> bool:
        """Whether ``node`` is in here."""
        return self._place.one[node] != _NOT_ORDERED

    def time_of(self, node: int) -> int:
        """When ``node`` was last used."""
        return self._time.one[node]

    def times_of(self, nodes: Indices) -> Indices:
        """Return when each of ``nodes`` was last used."""
        return self._time.many[nodes]

    def set_time(self, node: int, time: int) -> None:
        """``node`` was used at ``time``; if it is in here, it does not stay where it is."""
        self._reserve(node)
        self.remove(node)
        self._time.one[node] = time

    def add(self, node: int) -> None:
        """``node``, not in here, is not used any more; it was until just now."""
        if self._tail == len(self._queue):
            self._compact()
        self._queue.one[self._tail] = node
        self._place.one[node] = self._tail
        self._tail += 1

    def expose(self, node: int) -> None:
        """``node``, not in here, lost its last child to an eviction."""
        self._place.one[node] = _EXPOSED
        heapq.heappush(self._exposed, (self._time.one[node], node))

    def remove(self, node: int) -> None:
        """``node`` is in use, has a child or left the tree. No error if it is not in here."""
        self._place.one[node] = _NOT_ORDERED

    def remove_all(self, nodes: Indices) -> None:
        """Remove many."""
        self._place.many[nodes] = _NOT_ORDERED

    def first(self) -> int | None:
        """Return the node that is unused longest."""
        self._skip_stale()
        queued = self._queue.one[self._head] if self._head < self._tail else None
        while self._exposed:
            time, node = self._exposed[0]
            if self._is_exposed(time, node):
                is_older = queued is None or time <= self._time.one[queued]
                return node if is_older else queued
            heapq.heappop(self._exposed)
        return queued

    def oldest(self, count: int) -> Indices:
        """Return the ``count`` nodes that are unused longest, in order; fewer if there are not."""
        queued = self._first_queued(count)
        if not self._exposed:
            return queued
        last = int(self._time.many[queued[-1]]) if len(queued) == count else None
        exposed = self._first_exposed(count, no_later_than=last)
        if not len(exposed):
            return queued
        nodes = np.concatenate((exposed, queued))
        return nodes[np.argsort(self._time.many[nodes], kind="stable")][:count]

    def _first_queued(self, count: int) -> Indices:
        self._skip_stale()
        found: list[Indices] = []
        at, missing = self._head, count
        while missing > 0 and at < self._tail:
            stop = min(at + 2 * missing, self._tail)
            live = self._live_between(at, stop)[:missing]
            found.append(live)
            missing -= len(live)
            at = stop
        return np.concatenate(found) if found else self._queue.many[:0]

    def _first_exposed(self, count: int, *, no_later_than: int | None) -> Indices:
        found: list[tuple[int, int]] = []
        while self._exposed and len(found) < count:
            time, node = self._exposed[0]
            if no_later_than is not None and time > no_later_than:
                break
            heapq.heappop(self._exposed)
            if self._is_exposed(time, node) and (not found or found[-1] != (time, node)):
                found.append((time, node))
        for entry in found:
            heapq.heappush(self._exposed, entry)
        return np.array([node for _, node in found], dtype=np.int64)

    def _is_exposed(self, time: int, node: int) -> bool:
        return self._place.one[node] == _EXPOSED and self._time.one[node] == time

    def _skip_stale(self) -> None:
        """Move the head to the first live entry: a few steps one by one, many at once."""
        for _ in range(min(_FEW, self._tail - self._head)):
            if self._is_live(self._head):
                return
            self._head += 1
        while self._head < self._tail:
            stop = min(self._head + _MANY, self._tail)
            live = self._live_between(self._head, stop)
            if len(live):
                self._head = self._place.one[int(live[0])]
                return
            self._head = stop

    def _is_live(self, at: int) -> bool:
        return self._place.one[self._queue.one[at]] == at

    def _live_between(self, start: int, stop: int) -> Indices:
        entries = self._queue.many[start:stop]
        return entries[self._place.many[entries] == np.arange(start, stop)]

    def _compact(self) -> None:
        """Make room at the tail; each time follows at least as many appends as there are nodes."""
        live = self._live_between(self._head, self._tail)
        self._queue.many[: len(live)] = live
        self._place.many[live] = np.arange(len(live))
        self._head, self._tail = 0, len(live)

    def _reserve(self, node: int) -> None:
        if node >= len(self._place):
            self._place.reserve(node + 1)
            self._time.reserve(node + 1)
            self._queue.reserve(2 * len(self._place))

    def clear(self) -> None:
        """Forget all nodes."""
        self._place.many[:] = _NOT_ORDERED
        self._head = self._tail = 0
        self._exposed.clear()

    def check_invariants(self) -> None:
        """Assert the invariants above."""
        queued = self._live_between(self._head, self._tail)
        assert len(queued) == np.count_nonzero(self._place.many >= 0), "a queued leaf is lost"
        assert (np.diff(self._time.many[queued]) >= 0).all(), "the queue of leaves is not in order"
        exposed = np.flatnonzero(self._place.many == _EXPOSED).tolist()
        entries = {(self._time.one[node], node) for node in exposed}
        assert entries <= set(self._exposed), "an exposed node is lost"
