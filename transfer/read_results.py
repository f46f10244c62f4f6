"""What the end of a read means for the request that waits for it, if one does."""

from core.errors import InternalError
from core.ids import OperationId
from core.kv_layout import KVLayout
from transfer.actions import Action
from transfer.endpoints import Endpoints
from transfer.integrity import Digests, expected_digests
from transfer.operations import Operation
from transfer.receiving import Failure
from transfer.receptions import Receptions
from transfer.stats import TransferStats


class ReadResults:
    """Ends reads, each once, and settles or fails the request that one was for."""

    def __init__(
        self,
        layout: KVLayout,
        endpoints: Endpoints,
        requests: Receptions,
        stats: TransferStats,
    ) -> None:
        self._layout = layout
        self._endpoints = endpoints
        self._requests = requests
        self._stats = stats

    def landed(self, operation: OperationId, now: float) -> list[Action]:
        """See ``Reader.landed``."""
        ended = self._end_read(operation)
        if ended is None:
            return []
        pending, actions = ended
        filled = self._requests.filled_by(pending)
        if filled is None:
            return actions
        entry, piece = filled
        piece.land(now)
        entry.kv_nbytes += pending.nbytes
        return [*actions, *self._requests.settle(entry, now)]

    def expected_digests(self, operation: OperationId) -> Digests | None:
        """See ``Reader.expected_digests``."""
        pending = self._endpoints.get(operation)
        filled = None if pending is None else self._requests.filled_by(pending)
        if filled is None:
            return None
        entry, piece = filled
        if entry.shape.is_converted:
            return None
        return expected_digests(piece.ticket, piece.targets, self._layout)

    def damaged(self, operation: OperationId, now: float) -> list[Action]:
        """See ``Reader.damaged``."""
        ended = self._end_read(operation)
        if ended is None:
            return []
        self._stats.checksum_failures += 1
        failure = Failure("integrity", "a read has brought other bytes than were sent")
        return self._fail_filled(*ended, failure, now)

    def cancelled(self, operation: OperationId) -> list[Action]:
        """See ``Reader.read_cancelled``."""
        ended = self._end_read(operation)
        if ended is None:
            return []
        pending, actions = ended
        if self._requests.filled_by(pending) is not None:
            raise InternalError(f"operation {operation} was cancelled, but {pending.owner} waits")
        self._stats.reads_cancelled += 1
        return actions

    def failed(self, operation: OperationId, reason: str, now: float) -> list[Action]:
        """See ``Reader.read_failed``."""
        ended = self._end_read(operation, failure=reason)
        if ended is None:
            return []
        self._stats.reads_failed += 1
        return self._fail_filled(*ended, Failure("read", f"read failed: {reason}"), now)

    def _end_read(
        self, operation: OperationId, *, failure: str | None = None
    ) -> tuple[Operation, list[Action]] | None:
        """Forget a read that is terminal; None: it ended before or never was, and is counted."""
        pending, actions = self._endpoints.end(operation, failure=failure)
        if pending is None:
            self._stats.stale["outcome"] += 1
            return None
        return pending, actions

    def _fail_filled(
        self, pending: Operation, actions: list[Action], failure: Failure, now: float
    ) -> list[Action]:
        """Fail the request that waits for a read, if one does, behind ``actions``."""
        filled = self._requests.filled_by(pending)
        if filled is None:
            return actions
        entry, piece = filled
        piece.roll_back()  # its read is over: only the request still has to end
        return [*actions, *self._requests.fail(entry, failure, now)]
