"""Whether the router takes what comes: how much it has already, and whether it is about to end."""

from typing import NoReturn

from core.errors import OverloadedError, RequestError
from router.failures import ShuttingDownError
from router.metrics import RouterMetrics


class Admission:
    """Counts the sequences in the router, from the arrival of their request to its end.

    open ──announce_end──> leaving, but open ──refuse──> closed ──the last one ends──> drained
    """

    def __init__(self, *, max_pending: int, metrics: RouterMetrics) -> None:
        self._max_pending = max_pending
        self._metrics = metrics
        self._num_pending = 0
        self._is_leaving = False
        self._is_closed = False

    @property
    def num_pending(self) -> int:
        """Sequences in the router now."""
        return self._num_pending

    @property
    def is_leaving(self) -> bool:
        """Whether the router is about to end, though it may still take requests."""
        return self._is_leaving

    @property
    def is_drained(self) -> bool:
        """Whether new requests are refused, and none is left."""
        return self._is_closed and not self._num_pending

    def announce_end(self) -> None:
        """Have whoever asks told to send new requests elsewhere; those that come are taken."""
        self._is_leaving = True

    def refuse(self) -> None:
        """Refuse what comes from now on; what is pending goes on."""
        self._is_leaving = self._is_closed = True

    def check_room(self) -> None:
        """Refuse a request for which there is no place, before the work of tokenizing it.

        Raises:
            OverloadedError: as ``take`` would for one sequence.
        """
        if self._is_closed:
            raise ShuttingDownError("the router is shutting down; try again")
        if self._num_pending >= self._max_pending:
            self._refuse_full()

    def take(self, num_sequences: int) -> None:
        """Count a request's sequences in; ``give_back`` counts them out.

        Raises:
            OverloadedError: too many sequences are pending. Nothing was counted.
            RequestError: the request alone has more sequences than may be pending.
        """
        if num_sequences > self._max_pending:
            raise RequestError(
                f"n: {num_sequences} sequences in one request, at most {self._max_pending} are "
                "served; lower n or send fewer prompts",
                field="n",
            )
        self.check_room()
        if self._num_pending + num_sequences > self._max_pending:
            self._refuse_full()
        self._num_pending += num_sequences

    def give_back(self, num_sequences: int) -> None:
        """Count sequences of ``take`` out: nothing of them runs on."""
        self._num_pending -= num_sequences

    def _refuse_full(self) -> NoReturn:
        self._metrics.rejections.labels(reason="queue_full").inc()
        raise OverloadedError(f"{self._num_pending} requests are pending; try again later")
