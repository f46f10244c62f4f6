"""When to leave a failing storage alone, and when to try it again."""

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """Opens after failures in a row; then one call is let through from time to time.

    Pure: time comes in as an argument.
    """

    max_failures: int
    """In a row, before it opens."""
    retry_s: float
    """Between the calls that are let through while it is open."""
    num_failures: int = 0
    """In a row, up to now."""
    num_opened: int = 0
    _next_try: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls are refused."""
        return self.num_failures >= self.max_failures

    def allows(self, now: float) -> bool:
        """Whether to call now. While open, a True also begins the wait for the next one."""
        if not self.is_open:
            return True
        if now < self._next_try:
            return False
        self._next_try = now + self.retry_s
        return True

    def succeeded(self) -> None:
        """A call came back: the storage works."""
        self.num_failures = 0

    def failed(self, now: float) -> bool:
        """A call failed or did not come back. Return whether this one opened the breaker."""
        was_open = self.is_open
        self.num_failures += 1
        if self.is_open:
            self._next_try = now + self.retry_s
        self.num_opened += self.is_open and not was_open
        return self.is_open and not was_open
