"""Why services still wait to be placed, in one line. Pure."""

from collections.abc import Mapping

Resources = Mapping[str, float]


def shortage(asked: Mapping[str, Resources], total: Resources, free: Resources) -> str:
    """Return what the services in ``asked`` ask for, by name, and what of it the cluster has."""
    demands = [f"{name} ({_amounts(room)})" for name, room in sorted(asked.items())]
    kinds = sorted({kind for room in asked.values() for kind in room if room[kind] > 0})
    offers = [f"{kind} {free.get(kind, 0):g} of {total.get(kind, 0):g} free" for kind in kinds]
    return f"no room for {', '.join(demands)}: the Ray cluster has {', '.join(offers)}"


def _amounts(room: Resources) -> str:
    return ", ".join(f"{kind} {amount:g}" for kind, amount in sorted(room.items()) if amount > 0)
