"""How refused requests are told of: all are counted, and few lines are logged."""

import logging
from typing import Final

log = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 10.0
"""Between two lines of one reason: who can reach a port must not be able to fill a disk."""


class Refusals:
    """Counts refused read requests; logs the first of a reason at once, the others in sums."""

    def __init__(self) -> None:
        self.count = 0
        """All of them."""
        self._logged_at: dict[str, float] = {}
        self._unlogged: dict[str, int] = {}

    def record(self, reason: str, *, now_s: float) -> None:
        """Count one request that was refused for ``reason``, one of few.

        Args:
            reason: In words; never anything that the request says.
            now_s: Of a monotonic clock.
        """
        self.count += 1
        unlogged = self._unlogged.get(reason, 0) + 1
        last = self._logged_at.get(reason)
        if last is not None and now_s - last < LOG_INTERVAL_S:
            self._unlogged[reason] = unlogged
            return
        self._logged_at[reason], self._unlogged[reason] = now_s, 0
        log.warning(
            "read requests refused reason=%s count=%d total=%d", reason, unlogged, self.count
        )
