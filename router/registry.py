"""Which workers there are, as their heartbeats tell. Pure: the time comes in as an argument."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from core.ids import Incarnation, WorkerId
from core.messages import DesiredWorkers, Heartbeat, PrefillPeer, Role
from core.messages.serving import MAX_PEERS


class Change(Enum):
    """What a heartbeat told about its worker."""

    NONE = auto()
    """Known, and the same process as before."""
    APPEARED = auto()
    RESTARTED = auto()
    """Another incarnation: whatever ran on the old one is lost."""


@dataclass(slots=True)
class Worker:
    """One living worker process."""

    heartbeat: Heartbeat
    last_seen_s: float
    proven: bool
    """Requests may go there: a decode worker has answered a generation, a prefill worker has
    reported."""
    suspect: bool = False
    """Failed a request since its last heartbeat."""

    @property
    def worker_id(self) -> WorkerId:
        """The same for all lives of one worker."""
        return self.heartbeat.worker_id

    @property
    def incarnation(self) -> Incarnation:
        """Of this life."""
        return self.heartbeat.incarnation

    @property
    def is_draining(self) -> bool:
        """Whether this life has said that it takes nothing new and ends when it is idle."""
        return self.heartbeat.state == "draining"

    @property
    def is_usable(self) -> bool:
        """Whether new requests may be sent there."""
        return self.proven and self.heartbeat.state == "ready"


@dataclass
class WorkerRegistry:
    """Workers by id.

    Invariants (``check_invariants``):
        * a worker has one incarnation at a time, the newest that reported;
        * an incarnation that was replaced or lost is never taken back by a late heartbeat of its.
    """

    silence_s: float
    """After this long without a heartbeat a worker is gone."""
    lost_shown_s: float = 300.0
    """How long an operator is told of a worker that was lost and has not come back."""
    _lost: dict[WorkerId, Worker] = field(default_factory=dict[WorkerId, Worker])
    _workers: dict[WorkerId, Worker] = field(default_factory=dict[WorkerId, Worker])
    _replaced: dict[WorkerId, Incarnation] = field(default_factory=dict[WorkerId, Incarnation])
    _proven: dict[WorkerId, Incarnation] = field(default_factory=dict[WorkerId, Incarnation])
    """Lives that have generated: one that was silent for a while need not prove itself again."""

    def observe(self, heartbeat: Heartbeat, *, now_s: float) -> Change:
        """Record ``heartbeat``. A decode worker's new life is not usable before ``prove``."""
        if self._replaced.get(heartbeat.worker_id) == heartbeat.incarnation:
            return Change.NONE
        self._lost.pop(heartbeat.worker_id, None)
        known = self._workers.get(heartbeat.worker_id)
        if known is not None and known.incarnation == heartbeat.incarnation:
            known.heartbeat = heartbeat
            known.last_seen_s = now_s
            known.suspect = False
            return Change.NONE
        if known is not None:
            self._replaced[heartbeat.worker_id] = known.incarnation
        has_generated = self._proven.get(heartbeat.worker_id) == heartbeat.incarnation
        self._workers[heartbeat.worker_id] = Worker(
            heartbeat, now_s, proven=has_generated or heartbeat.role == "prefill"
        )
        return Change.APPEARED if known is None else Change.RESTARTED

    def prove(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Record that this life of the worker has answered a generation."""
        worker = self.get(worker_id)
        if worker is not None and worker.incarnation == incarnation:
            worker.proven = True
            self._proven[worker_id] = incarnation

    def suspect(self, worker_id: WorkerId) -> None:
        """Record that a request failed there: avoided until its next heartbeat."""
        worker = self.get(worker_id)
        if worker is not None:
            worker.suspect = True

    def drain(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Record that this life of the worker takes nothing new, ahead of its heartbeat."""
        worker = self.get(worker_id)
        if worker is not None and worker.incarnation == incarnation:
            worker.heartbeat = msgspec.structs.replace(worker.heartbeat, state="draining")

    def lose(self, worker_id: WorkerId, incarnation: Incarnation) -> Worker | None:
        """Forget and return this life of the worker; None: not known. It may report again."""
        worker = self.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            return None
        self._forget(worker)
        return worker

    def expire(self, *, now_s: float) -> list[Worker]:
        """Forget and return the workers that were silent for too long."""
        silent = [w for w in self._workers.values() if w.last_seen_s + self.silence_s <= now_s]
        for worker in silent:
            self._forget(worker)
        return silent

    def lost(self, *, now_s: float) -> list[Worker]:
        """Return the workers that were lost lately and did not drain, as they last reported."""
        for worker in list(self._lost.values()):
            if worker.last_seen_s + self.lost_shown_s <= now_s:
                del self._lost[worker.worker_id]
        return sorted(self._lost.values(), key=lambda worker: worker.worker_id)

    def _forget(self, worker: Worker) -> None:
        del self._workers[worker.worker_id]
        if not worker.is_draining:
            self._lost[worker.worker_id] = worker

    def next_expiry_s(self) -> float | None:
        """Return when the next worker will have been silent for too long; None without workers."""
        times = [worker.last_seen_s for worker in self._workers.values()]
        return min(times) + self.silence_s if times else None

    def get(self, worker_id: WorkerId) -> Worker | None:
        """Return the worker, if it lives."""
        return self._workers.get(worker_id)

    def is_current(self, heartbeat: Heartbeat) -> bool:
        """Whether ``heartbeat`` is of the life that its worker has now."""
        worker = self.get(heartbeat.worker_id)
        return worker is not None and worker.incarnation == heartbeat.incarnation

    def workers(self, role: Role) -> Iterator[Worker]:
        """Yield the living workers of ``role``."""
        return (w for w in self._workers.values() if w.heartbeat.role == role)

    def desired(self, told_here: DesiredWorkers | None) -> DesiredWorkers | None:
        """Return the newest word of which workers are wanted; None: nobody has one.

        Args:
            told_here: What the controller has told this router, though no worker lives.
        """
        words = [told_here, *(w.heartbeat.desired for w in self._workers.values())]
        told = [word for word in words if word is not None]
        return max(told, key=lambda word: (word.generation, word.edition), default=None)

    def controller_silence_s(self, *, now_s: float, here_s: float | None) -> float | None:
        """Return how long ago the controller told anybody anything; None: nobody was ever told.

        The one who was told last counts: a controller that is silent to one worker is not silent.

        Args:
            now_s: As of ``observe``.
            here_s: How long ago it told this router anything; None: it never did.
        """
        silences = [
            worker.heartbeat.controller_silence_s + max(now_s - worker.last_seen_s, 0.0)
            for worker in self._workers.values()
            if worker.heartbeat.controller_silence_s is not None
        ]
        if here_s is not None:
            silences.append(here_s)
        return min(silences, default=None)

    def usable(self, role: Role) -> list[Worker]:
        """Return the workers of ``role`` that may get requests."""
        return [worker for worker in self.workers(role) if worker.is_usable]

    def prefill_peers(self) -> tuple[PrefillPeer, ...]:
        """Return the usable prefill workers, in the order of their ids."""
        usable = sorted(self.usable("prefill"), key=lambda worker: worker.worker_id)
        return tuple(
            PrefillPeer(w.worker_id, w.incarnation, w.heartbeat.address) for w in usable[:MAX_PEERS]
        )

    def check_invariants(self) -> None:
        """Assert the invariants above."""
        for worker_id, worker in self._workers.items():
            assert worker.worker_id == worker_id, "filed under another id"
            assert self._replaced.get(worker_id) != worker.incarnation, "an old life came back"
