"""What has happened, kept for drivers that come and go."""

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice

from deploy.supervision.events import Event

MAX_EVENTS = 1000
"""That are kept; a reader that comes too late misses the oldest."""


class EventLog:
    """The events of one life of a controller. Any thread writes and reads."""

    def __init__(self) -> None:
        self._life = secrets.randbits(62)
        self._grown = threading.Condition()
        """Protects the two below."""
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        """That ever were."""

    def append(self, events: Sequence[Event]) -> None:
        """Add ``events``, and wake up who waits for them."""
        with self._grown:
            self._events.extend(events)
            self._num_events += len(events)
            self._grown.notify_all()

    def read(self, life: int, start: int, wait_s: float) -> tuple[int, int, list[Event]]:
        """Return which life of the controller this is, where to go on, and events from ``start``.

        Waits ``wait_s`` for the first. Of another ``life``, all of this one's are returned, the
        latest ``MAX_EVENTS`` at most.
        """
        first = start if life == self._life else 0
        with self._grown:
            self._grown.wait_for(lambda: self._num_events > first, wait_s)
            num_new = min(self._num_events - first, len(self._events))
            events = list(islice(self._events, len(self._events) - num_new, None))
            return self._life, self._num_events, events
