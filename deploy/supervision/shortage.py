"""Why services still wait to be placed, in one line. Pure."""

from collections.abc import Callable, Mapping

Resources = Mapping[str, float]

LOOK_S = 20.0
"""Between two looks at who waits; a process that has room takes some time to start, too."""


class RoomWatch:
    """Tells why workers wait for room: once per reason, and not of those that just start."""

    def __init__(self, now: float) -> None:
        """Args: ``now``, in monotonic seconds."""
        self._look_at = now + LOOK_S
        self._waited = False
        self._told: str | None = None

    def look(self, now: float, waits: Callable[[], str | None]) -> str | None:
        """Return what is to be told now; ``waits`` gives the reason, None where nobody waits."""
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_S
        reason = waits()
        waited, self._waited = self._waited, reason is not None
        if reason is None:
            self._told = None
        if not waited or reason == self._told:
            return None
        self._told = reason
        return reason


def shortage(asked: Mapping[str, Resources], total: Resources, free: Resources) -> str:
    """Return what the services in ``asked`` ask for, by name, and what of it the cluster has."""
    demands = [f"{name} ({_amounts(room)})" for name, room in sorted(asked.items())]
    kinds = sorted({kind for room in asked.values() for kind in room if room[kind] > 0})
    offers = [f"{kind} {free.get(kind, 0):g} of {total.get(kind, 0):g} free" for kind in kinds]
    return f"no room for {', '.join(demands)}: the Ray cluster has {', '.join(offers)}"


def _amounts(room: Resources) -> str:
    return ", ".join(f"{kind} {amount:g}" for kind, amount in sorted(room.items()) if amount > 0)
