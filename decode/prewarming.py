"""Which prefill workers to pair with before anybody asks for them, and when to try again. Pure."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from core.ids import Incarnation
from core.messages import PrefillPeer

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0


@dataclass(slots=True)
class _Candidate:
    """A life of a prefill worker that some router knows."""

    peer: PrefillPeer
    due_at: float | None
    """When to pair; None: that is under way, or done, or refused for good."""
    num_failures: int = 0
    """Since a first read has landed."""


class Prewarming:
    """Candidates for pairs, as routers announce them.

    A pair that fails is tried again after a time that doubles; one that was refused is not. A
    router that comes anew says nothing about whom it does not know yet: only who was announced
    and then taken back has left.
    """

    def __init__(self) -> None:
        self._announced: dict[Hashable, dict[Incarnation, PrefillPeer]] = {}
        self._candidates: dict[Incarnation, _Candidate] = {}

    def __len__(self) -> int:
        """Candidates, paired or not."""
        return len(self._candidates)

    def announced(
        self, router: Hashable, peers: Sequence[PrefillPeer], now: float
    ) -> list[Incarnation]:
        """``router`` has named every prefill worker that it knows. Return those that left."""
        before = self._announced.get(router, {})
        self._announced[router] = {peer.incarnation: peer for peer in peers}
        for peer in peers:
            self._candidates.setdefault(peer.incarnation, _Candidate(peer, due_at=now))
        left = [incarnation for incarnation in before if not self._is_known(incarnation)]
        for incarnation in left:
            self._candidates.pop(incarnation, None)
        return left

    def router_lost(self, router: Hashable) -> None:
        """``router`` says nothing any more. Its pairs stay, but a lost one is not tried again."""
        for incarnation in self._announced.pop(router, {}):
            if not self._is_known(incarnation):
                self._candidates.pop(incarnation, None)

    def warmed(self, incarnation: Incarnation) -> None:
        """A first read has landed."""
        if incarnation in self._candidates:
            self._candidates[incarnation].num_failures = 0

    def failed(self, incarnation: Incarnation, now: float, *, is_final: bool) -> None:
        """The pair could not be made, or is lost; ``is_final``: it never will be."""
        candidate = self._candidates.get(incarnation)
        if candidate is None:
            return
        candidate.num_failures += 1
        wait_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** (min(candidate.num_failures, 32) - 1))
        candidate.due_at = None if is_final else now + wait_s

    def due(self, now: float) -> list[PrefillPeer]:
        """Return whom to pair with now; each is answered by ``warmed`` or ``failed``."""
        ready = [c for c in self._candidates.values() if c.due_at is not None and c.due_at <= now]
        for candidate in ready:
            candidate.due_at = None
        return [candidate.peer for candidate in ready]

    def next_at(self) -> float | None:
        """Return when ``due`` has something, if nothing happens before."""
        times = (candidate.due_at for candidate in self._candidates.values())
        return min((time for time in times if time is not None), default=None)

    def _is_known(self, incarnation: Incarnation) -> bool:
        return any(incarnation in peers for peers in self._announced.values())
