"""What becomes of a request for KV, as the worker is told."""

from dataclasses import dataclass
from typing import Literal, Protocol

from core.ids import Owner, WorkerId
from core.messages import FirstToken
from transfer.actions import ReceiveStats


@dataclass(frozen=True, slots=True)
class Delivery:
    """A request's KV is here and may be trusted."""

    owner: Owner
    first_token: FirstToken
    stats: ReceiveStats
    transport: str


@dataclass(frozen=True, slots=True)
class Loss:
    """A request ends without a result."""

    owner: Owner
    reason: str
    kind: Literal["request", "capacity", "transfer", "internal", "draining"]
    peer: WorkerId | None = None
    field: str | None = None


class ReceiverOwner(Protocol):
    """What the receiver tells the worker."""

    def delivered(self, delivery: Delivery) -> None:
        """A request can decode."""
        ...

    def lost(self, loss: Loss) -> None:
        """A request's KV will not come. Its blocks are still its own."""
        ...

    def memory_changed(self) -> None:
        """Blocks may have become free."""
        ...
