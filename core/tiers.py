"""What the block manager asks of whoever moves bytes between the pool, host memory and storage.

Values only. Every action is known by its operation, never by the blocks or names in it: these can
have another owner, or be gone, when the answer comes.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType, TypeAlias

from core.ids import BlockId, OperationId

HostSlot = NewType("HostSlot", int)
"""Row of a worker's host memory tier; holds one block."""


class Tier(StrEnum):
    """Where a block's content can be; the name on the wire and in metrics."""

    DEVICE = "device"
    """The pool."""
    HOST = "host"
    """Memory of the worker's machine."""
    STORAGE = "storage"
    """Outlives the worker, and is shared with others."""


class BlockName(NamedTuple):
    """Names the content of one full block: equal names mean equal bytes."""

    group: int
    digest: bytes
    """Over all tokens up to the block's end, and all else that decides their KV."""


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Copy blocks of the pool into host slots."""

    operation: OperationId
    block_ids: tuple[BlockId, ...]
    slots: tuple[HostSlot, ...]


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Copy host slots into blocks of the pool."""

    operation: OperationId
    slots: tuple[HostSlot, ...]
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Write host slots to storage. The slots keep their bytes until the answer."""

    operation: OperationId
    names: tuple[BlockName, ...]
    slots: tuple[HostSlot, ...]


@dataclass(frozen=True, slots=True)
class Find:
    """Tell how many of ``names``, from the first on without a gap, are in storage."""

    operation: OperationId
    names: tuple[BlockName, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Read from storage into host slots, and verify what was read."""

    operation: OperationId
    names: tuple[BlockName, ...]
    slots: tuple[HostSlot, ...]


@dataclass(frozen=True, slots=True)
class MarkEpoch:
    """Make sure that later workers begin with ``epoch``: what was written before is forgotten.

    Whoever writes does it before any other write. Answered by epoch, and more than once where it
    failed at first.
    """

    operation: OperationId
    epoch: str


TierAction: TypeAlias = CopyOut | CopyIn | Write | Find | Read | MarkEpoch
