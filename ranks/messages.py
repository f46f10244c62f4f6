"""What the leader of a worker's ranks and a follower say to each other."""

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from core.config import SluiceConfig
from core.ids import Incarnation, OperationId, StepSeq
from core.messages import PoolEndpoint, Welcome
from core.messages.base import Role
from transfer.actions import PostRead
from transfer.reads import ReadEnd


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What one rank is told at its start."""

    rank: int
    num_ranks: int
    worker: str
    """Name of the worker, for logs."""
    role: Role
    incarnation: Incarnation
    model_path: Path
    config: SluiceConfig
    store: Path
    """Where the ranks meet; see ``RankGroup.join``."""

    @property
    def has_transfers(self) -> bool:
        """Whether KV is read here, or from here."""
        return self.role == "prefill" or self.config.deploy.prefill > 0


# Steps: on one socket, the engines' threads speak.


@dataclass(frozen=True, slots=True)
class Load:
    """Read the model now."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A follower has its part of the model, and waits to meet the others."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A follower cannot start."""

    reason: str
    is_final: bool
    """The config or the model is at fault: another try gives the same."""


@dataclass(frozen=True, slots=True)
class Meet:
    """All have loaded: join the group now."""


@dataclass(frozen=True, slots=True)
class Started:
    """A follower's engine is warm. Steps (``StepBatch``) may come from now on."""

    endpoint: PoolEndpoint | None
    """Where its pool is read, on prefill."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A follower's part of a step is over: its device writes nothing for it any more."""

    step: StepSeq
    failure: str | None = None


# Transfers: on another socket, the event loops speak.


@dataclass(frozen=True, slots=True)
class Connect:
    """See ``Reads.connect``."""

    source: Incarnation
    welcome: Welcome


@dataclass(frozen=True, slots=True)
class Post:
    """See ``Reads.post``."""

    read: PostRead


@dataclass(frozen=True, slots=True)
class WarmUp:
    """See ``Reads.warm_up``."""

    operation: OperationId
    source: Incarnation


@dataclass(frozen=True, slots=True)
class Cancel:
    """See ``Reads.cancel``."""

    operation: OperationId


@dataclass(frozen=True, slots=True)
class TearDown:
    """See ``Reads.tear_down``."""

    source: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class Serve:
    """See ``Pump.serve``."""

    reader: Hashable
    active: bool


@dataclass(frozen=True, slots=True)
class Ping:
    """The leader wants to hear that the follower runs."""


@dataclass(frozen=True, slots=True)
class Pong:
    """It runs."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A follower's part of a read is terminal."""

    end: ReadEnd


Command: TypeAlias = Connect | Post | WarmUp | Cancel | TearDown | Serve | Ping
