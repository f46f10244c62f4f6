"""What can happen to a running deployment, in the order in which it is told."""

from dataclasses import dataclass
from queue import SimpleQueue

from core.messages import Party


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One life of an actor."""

    pid: int
    host: str
    name: str
    role: Party
    revision: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Ctrl-C, SIGTERM, or ``sluice down`` from elsewhere."""


@dataclass(frozen=True, slots=True)
class ServiceEnded:
    """The service ended in order: after a stop, or with an error that no restart can mend."""

    name: str
    error: str | None


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """The service's process is gone. The controller starts another, or tells ``GaveUp``."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """A process of the service is up, the first or a later one."""

    name: str
    identity: ProcessIdentity


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The service stays down until an operator changes something."""

    name: str
    reason: str


Event = StopRequested | ServiceEnded | ProcessDied | ProcessStarted | GaveUp
EventQueue = SimpleQueue[Event]
"""Of one deployment; any thread and any signal handler may put."""
