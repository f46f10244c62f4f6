"""Which bytes are posted next: many requests' reads share a link, in small parts, in turn.

Pure: the shell asks for quanta, posts them, and says how each ended.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from core.errors import InternalError
from core.ids import Incarnation, OperationId, Owner
from transfer.flows import DESCRIPTOR_COST_NBYTES, Flow, Unposted, cost_of, nbytes_of
from transfer.quanta import EndedRead, Quantum, QueueLimits, ReadPart
from transfer.split import joined, split
from transfer.transport import ExtentRows

_FlowKey: TypeAlias = tuple[Owner, Incarnation]


@dataclass(slots=True, eq=False)
class _Operation:
    operation: OperationId
    peer: Incarnation
    queued_at: float
    flows: tuple[_FlowKey, ...]
    """That had parts of it."""
    num_parts: int
    """Not wholly posted yet."""
    num_in_flight: int = 0
    nbytes: int = 0
    num_descriptors: int = 0
    failure: str | None = None
    is_cancelled: bool = False

    def end(self) -> EndedRead:
        return EndedRead(
            operation=self.operation,
            peer=self.peer,
            queued_at=self.queued_at,
            nbytes=self.nbytes,
            num_descriptors=self.num_descriptors,
            failure=self.failure,
            is_cancelled=self.is_cancelled and self.failure is None,
        )


class ReadQueue:
    """Deficit round robin by bytes over owners; a descriptor counts as some bytes.

    An owner whose turn it is posts one quantum, a longer one where nobody else has anything to
    post. So a short read waits for one quantum of each
    other owner at most, and for what is in flight, never for the whole of a long read. Whoever
    reads from a peer that has enough in flight is passed over and loses nothing by it.

    Source: Shreedhar and Varghese, "Efficient Fair Queuing using Deficit Round Robin" (1995).

    Invariants (``check_invariants``):
        * an operation is known until it is terminal, and ends exactly once;
        * each byte is in one quantum at most, and bytes in flight are those of quanta not ended.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._operations: dict[OperationId, _Operation] = {}
        self._flows: dict[_FlowKey, Flow] = {}
        self._rotation: deque[_FlowKey] = deque()
        self._quanta: dict[int, Quantum] = {}
        self._in_flight: Counter[Incarnation] = Counter()
        self._total_in_flight = 0
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        """Operations that are not terminal."""
        return len(self._operations)

    @property
    def has_unposted(self) -> bool:
        """Whether a quantum is left to post, now or when others have ended."""
        return bool(self._rotation)

    @property
    def in_flight_nbytes(self) -> int:
        """Posted and not ended."""
        return self._total_in_flight

    def add(
        self,
        operation: OperationId,
        owner: Owner,
        parts: Iterable[ReadPart],
        now: float,
    ) -> None:
        """Post all of ``parts`` for ``owner`` in time.

        Args:
            operation: Of all parts together.
            owner: Takes turns with other owners.
            parts: Peers, each once, and what to read of each.
            now: Kept for ``EndedRead``.

        Raises:
            InternalError: there is nothing to read, or the operation is known already.
        """
        chosen = [(peer, extents) for peer, extents in parts if len(extents)]
        if not chosen or operation in self._operations:
            raise InternalError(f"operation {operation} has nothing to read, or reads already")
        keys = tuple((owner, peer) for peer, _ in chosen)
        first_peer = chosen[0][0]
        self._operations[operation] = _Operation(operation, first_peer, now, keys, len(keys))
        for key, (_, extents) in zip(keys, chosen, strict=True):
            self._enqueue(key, operation, extents)

    def next(self) -> Quantum | None:
        """Return what to post now, in flight from here on; None: wait for an end, or an ``add``."""
        for _ in range(len(self._rotation)):
            key = self._rotation.popleft()
            flow = self._flows[key]
            if not self._has_room(flow.peer):
                self._rotation.append(key)
                continue
            flow.credit += self._turn_nbytes(flow.peer) + DESCRIPTOR_COST_NBYTES
            quantum = self._take(flow)
            if flow.parts:
                self._rotation.append(key)
            else:
                del self._flows[key]
            return quantum
        return None

    def ended(self, quantum: Quantum, failure: str | None = None) -> list[EndedRead]:
        """``quantum`` is terminal: landed, or, with the reason why, failed.

        A failure is that of its operations as a whole: what is left of them is not posted.

        Raises:
            InternalError: it has ended before.
        """
        if self._quanta.pop(quantum.number, None) is None:
            raise InternalError(f"quantum {quantum.number} of {quantum.peer} ended twice")
        self._in_flight[quantum.peer] -= quantum.nbytes
        if not self._in_flight[quantum.peer]:
            del self._in_flight[quantum.peer]
        self._total_in_flight -= quantum.nbytes
        for operation in quantum.operations:
            entry = self._operations[operation]
            entry.num_in_flight -= 1
            if failure is not None:
                entry.failure = entry.failure or failure
                self._drop_parts(entry)
        return self._terminal(quantum.operations)

    def cancel(self, operation: OperationId) -> list[EndedRead]:
        """Post nothing more of ``operation``. One that is posted wholly, or is unknown, goes on."""
        entry = self._operations.get(operation)
        if entry is None or entry.num_parts == 0:
            return []
        entry.is_cancelled = True
        self._drop_parts(entry)
        return self._terminal((operation,))

    def drop(self, peer: Incarnation, reason: str) -> list[EndedRead]:
        """Post nothing more from ``peer``: operations that would have needed it fail."""
        waiting = {
            part.operation: None
            for (_, of_peer), flow in self._flows.items()
            if of_peer == peer
            for part in flow.parts
        }
        for operation in waiting:
            entry = self._operations[operation]
            entry.failure = entry.failure or reason
            self._drop_parts(entry)
        return self._terminal(waiting)

    # Within

    def _enqueue(self, key: _FlowKey, operation: OperationId, extents: ExtentRows) -> None:
        rows = split(extents, self._limits.quantum_nbytes)
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = Flow(key[1])
            self._rotation.append(key)
        flow.parts.append(Unposted(operation, rows, nbytes_of(rows)))

    def _has_room(self, peer: Incarnation) -> bool:
        of_peer = self._in_flight[peer]
        return of_peer == 0 or (
            of_peer < self._limits.max_peer_nbytes
            and self._total_in_flight < self._limits.max_total_nbytes
        )

    def _turn_nbytes(self, peer: Incarnation) -> int:
        """Return what the turn of a flow that is not in the rotation is worth."""
        limits = self._limits
        if self._rotation:
            return limits.quantum_nbytes
        room = min(
            limits.max_peer_nbytes - self._in_flight[peer],
            limits.max_total_nbytes - self._total_in_flight,
        )
        return max(limits.quantum_nbytes, min(limits.lone_quantum_nbytes, room))

    def _take(self, flow: Flow) -> Quantum:
        """Return what the credit of ``flow`` pays for; it always pays for one extent."""
        taken = list(self._spend(flow))
        extents = joined([rows for _, rows, _ in taken])
        quantum = Quantum(
            number=next(self._numbers),
            peer=flow.peer,
            operations=tuple(operation for operation, _, _ in taken),
            extents=extents,
            nbytes=sum(nbytes for _, _, nbytes in taken),
        )
        self._quanta[quantum.number] = quantum
        self._in_flight[flow.peer] += quantum.nbytes
        self._total_in_flight += quantum.nbytes
        return quantum

    def _spend(self, flow: Flow) -> Iterator[tuple[OperationId, ExtentRows, int]]:
        while flow.parts:
            part = flow.parts[0]
            rows, nbytes = part.take(flow.credit)
            if not len(rows):
                return
            flow.credit -= cost_of(nbytes, len(rows))
            entry = self._operations[part.operation]
            entry.num_in_flight += 1
            entry.nbytes += nbytes
            entry.num_descriptors += len(rows)
            yield part.operation, rows, nbytes
            if not part.is_posted:
                return
            flow.parts.popleft()
            entry.num_parts -= 1

    def _drop_parts(self, entry: _Operation) -> None:
        if entry.num_parts == 0:
            return
        for key in entry.flows:
            flow = self._flows.get(key)
            if flow is None:
                continue
            entry.num_parts -= flow.drop(entry.operation)
            if not flow.parts:
                del self._flows[key]
                self._rotation.remove(key)

    def _terminal(self, operations: Iterable[OperationId]) -> list[EndedRead]:
        """Forget those of ``operations`` that are terminal, and return their ends."""
        ended: list[EndedRead] = []
        for operation in operations:
            entry = self._operations[operation]
            if entry.num_parts == 0 and entry.num_in_flight == 0:
                del self._operations[operation]
                ended.append(entry.end())
        return ended

    def check_invariants(self) -> None:
        """Assert the invariants above: O(n), for tests."""
        assert sorted(self._rotation) == sorted(self._flows)
        parts: Counter[OperationId] = Counter()
        for flow in self._flows.values():
            assert flow.parts, "an empty flow takes turns"
            parts.update(part.operation for part in flow.parts)
        in_flight = Counter(o for quantum in self._quanta.values() for o in quantum.operations)
        for operation, entry in self._operations.items():
            assert entry.num_parts == parts[operation]
            assert entry.num_in_flight == in_flight[operation]
            assert entry.num_parts or entry.num_in_flight, "a terminal operation is kept"
        assert self._total_in_flight == sum(quantum.nbytes for quantum in self._quanta.values())
        assert self._total_in_flight == self._in_flight.total()
