"""The names of a deployment's services: ``router``, ``prefill-0``, ``decode-3``."""

from core.ids import WorkerId
from core.messages import Party, Role


def worker_name(role: Role, index: int) -> WorkerId:
    """Return the name of a worker, which is its id, too."""
    return WorkerId(f"{role}-{index}")


def role_of(name: str) -> Party:
    """Return the role that a service's name tells."""
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        if name.startswith(f"{role}-"):
            return role
    return "router"


def index_of(name: str) -> int:
    """Return the index that a worker's name tells; 0 for the router."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
