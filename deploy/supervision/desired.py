"""What is desired of a deployment, what is observed of it, and the actions in between."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from core.messages import DesiredWorkers, Party

State = Literal["pending", "adopted", "starting", "ready", "draining", "ended", "dead", "refused"]
"""``pending``: has not answered yet, such as for lack of room; ``adopted``: as that, but started by
an earlier controller; ``ended``: as it was told; ``dead``: its process is gone; ``refused``: it
ended by a config error, which no restart mends unless it has served by the same before."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of time and number; see the fields of the same names in ``DeployConfig``."""

    max_restarts: int
    restart_backoff_max_s: float
    healthy_after_s: float
    start_timeout_s: float
    drain_timeout_s: float
    progress_timeout_s: float
    max_surge: int


@dataclass(frozen=True, slots=True)
class Target:
    """What is wanted of one role."""

    replicas: int
    revision: str


@dataclass(frozen=True, slots=True)
class Desired:
    """What is wanted."""

    targets: Mapping[Party, Target]
    leaving: Mapping[str, Party] = field(default_factory=dict[str, Party])
    """Services that end to make room for one of another role, by name. The number of that role
    counts the new one already; it starts when the old one is gone. The last decode worker that
    serves goes when another one does."""
    generation: int = 0
    """Of the operator's changes: each gives a new chance to what has been given up."""

    def word(self, edition: int, trouble: tuple[str, ...]) -> DesiredWorkers:
        """Return what the services are told of it, with the ``trouble`` of that ``edition``."""
        none = Target(0, "")
        prefill, decode = (self.targets.get(role, none) for role in ("prefill", "decode"))
        return DesiredWorkers(
            generation=self.generation,
            prefill=prefill.replicas,
            decode=decode.replicas,
            prefill_revision=prefill.revision,
            decode_revision=decode.revision,
            edition=edition,
            trouble=trouble,
        )

    def is_served(self, observed: "Iterable[Observed]") -> bool:
        """Whether each role of which any are wanted has one that serves as it is wanted."""
        ready = {(seen.role, seen.revision) for seen in observed if seen.state == "ready"}
        return all(
            (role, target.revision) in ready
            for role, target in self.targets.items()
            if target.replicas
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """What is seen of one service."""

    name: str
    role: Party
    revision: str
    state: State
    silence_s: float = 0.0
    """How long ago it last proved progress."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a service, or start it anew under its old name."""

    name: str
    role: Party
    revision: str
    deaths: int = 0
    """In a row before this start."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Have it finish what it has, and end."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End its process now. It is to be seen as dead afterwards."""

    name: str
    reason: str
    is_unwanted: bool = False
    """It is sent away, and not started anew."""


@dataclass(frozen=True, slots=True)
class Forget:
    """It is over; its name is free."""

    name: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It stays down until the operator changes something. Told once."""

    name: str
    reason: str


Action = Start | Drain | Kill | Forget | GiveUp
