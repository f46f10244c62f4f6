"""Reads between this process's pool and its sources', from the decision to the proof of the end."""

from dataclasses import dataclass
from typing import Protocol

from core.ids import Incarnation, OperationId
from core.messages import Welcome
from transfer.actions import PostRead
from transfer.transport import PathKind


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """A read is terminal: nothing of it will be written any more."""

    operation: OperationId
    peer: Incarnation
    failure: str | None = None
    """Why it went wrong; None: every byte has landed, or the read was cancelled."""
    is_damaged: bool = False
    """Every byte has landed, but they are not the source's; ``failure`` says so, too."""
    is_cancelled: bool = False
    """It ended before all of it was posted, because ``cancel`` was called."""
    nbytes: int = 0
    num_descriptors: int = 0
    duration_s: float = 0.0
    """From the decision to read to the proof of the end."""
    path: PathKind = "unknown"
    """How the bytes travelled."""


class Reads(Protocol):
    """Carries reads out. Belongs to one event loop.

    Each ``post`` is answered by exactly one ``ReadEnd``, from the loop, never from within a call.
    Reads of several requests share the link, in small parts and in turn: a read may wait before it
    *begins*, which is when its first part is posted, and is told, too.
    """

    @property
    def transport(self) -> str:
        """Name of what moves the bytes."""
        ...

    @property
    def sources_must_progress(self) -> bool:
        """Whether a source must be told while it is read from: nothing else wakes it."""
        ...

    def connect(self, source: Incarnation, welcome: Welcome) -> None:
        """Prepare reads from ``source``, which has sent ``welcome``.

        Raises:
            HandshakeError: its blocks cannot become ours; names what differs.
            TransferError: its pools cannot be reached.
        """
        ...

    def post(self, read: PostRead) -> None:
        """Carry out ``read``. A source that is not connected, or lost, ends it as failed."""
        ...

    def warm_up(self, operation: OperationId, source: Incarnation) -> None:
        """Read some bytes of ``source`` that nobody wants, so that later reads find the way ready.

        It ends as a ``post`` does.
        """
        ...

    def cancel(self, operation: OperationId) -> None:
        """Post nothing more of a read; it ends when what is posted has. Else it changes nothing."""
        ...

    def tear_down(self, source: Incarnation, reason: str) -> None:
        """End every read of ``source``; each is reported once that is proven."""
        ...

    async def drain(self, *, timeout_s: float) -> bool:
        """Take no more reads, and wait until nothing that was posted is outstanding.

        Whoever wants no more parts of a read to be posted has cancelled it before.

        Returns:
            Whether that came within ``timeout_s``.
        """
        ...

    def close(self) -> None:
        """End every read; nothing is written on return. No end is reported any more."""
        ...
