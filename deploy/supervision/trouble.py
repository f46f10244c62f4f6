"""Who does not serve and why, in lines for an operator. Pure: the time comes in as an argument.

A line is told from what has happened to a service until it serves, or is there no more. The end of
what has been sent away is no trouble.
"""

from collections.abc import Mapping

from core.messages.serving import MAX_TROUBLES
from deploy.supervision.desired import NOT_WANTED, Observed
from deploy.supervision.events import Event, GaveUp, ProcessDied, ProcessStarted, ServiceEnded

MAX_LINE = 400
"""Characters."""
ROOM_WAIT_S = 30.0
"""What Ray has not placed for so long waits for room: a process of its own takes some seconds."""


class Troubles:
    """Remembers the last reason of each service that has one."""

    def __init__(self, now: float) -> None:
        """Begin at ``now``, seconds since the epoch: a later controller's word is the newer."""
        self._lines: dict[str, str] = {}
        """By name, the oldest first."""
        self._reasons: dict[str, str] = {}
        self._num_deaths: dict[str, int] = {}
        """Since it served."""
        self._ordered: dict[str, str] = {}
        """Why the death was ordered of whom it has not been heard yet."""
        self._leaving: set[str] = set()
        self._waiting_since: dict[str, float] = {}
        self._told: tuple[str, ...] = ()
        self._edition = int(now)

    def is_ordered(self, name: str) -> bool:
        """Return whether the death of this one was ordered, so that it is no news."""
        return name in self._ordered

    def order(self, name: str, reason: str) -> None:
        """Note that the end of its process is ordered."""
        self._ordered[name] = reason
        if reason == NOT_WANTED:
            self._leaving.add(name)

    def forget(self, name: str) -> None:
        """Forget all of it: who has the name next is another one."""
        self._drop_story(name)
        self._ordered.pop(name, None)
        self._waiting_since.pop(name, None)
        self._leaving.discard(name)

    def _drop_story(self, name: str) -> None:
        for kept in (self._lines, self._reasons, self._num_deaths):
            kept.pop(name, None)

    def hear(self, event: Event) -> Event:
        """Note what has happened; return it, with the last reason where a service is given up."""
        match event:
            case ProcessDied(name, reason):
                self._reasons[name] = reason = self._ordered.pop(name, reason)
                self._num_deaths[name] = num = self._num_deaths.get(name, 0) + 1
                times = f" {num} times in a row" if num > 1 else ""
                self._note(name, f"{name} died{times} and is started anew: {reason}")
            case ServiceEnded(name, error):
                self._ordered.pop(name, None)
                if error is not None:
                    self._reasons[name] = error
                    self._note(name, f"{name} refuses to start: {error}")
            case GaveUp(name, reason):
                if name in self._reasons:
                    event = GaveUp(name, _one_line(f"{reason}: {self._reasons[name]}"))
                self._note(name, f"{name} stays down: {event.reason}")
            case ProcessStarted(name, _):
                self._ordered.pop(name, None)
            case _:
                pass
        return event

    def see(self, now: float, observed: Mapping[str, Observed]) -> None:
        """Forget whom there is not, drop what is told of those who serve, see who waits for room.

        Args:
            now: Monotonic seconds.
            observed: All services by name.
        """
        known = self._lines.keys() | self._reasons.keys() | self._ordered.keys()
        known |= self._leaving | self._waiting_since.keys()
        for name in known - observed.keys():
            self.forget(name)
        for name, seen in observed.items():
            if seen.state == "draining":
                self._leaving.add(name)
            if seen.state in {"ready", "draining"}:
                self._drop_story(name)
            self._see_waiting(now, name, is_pending=seen.state == "pending")

    def _see_waiting(self, now: float, name: str, *, is_pending: bool) -> None:
        since = self._waiting_since.get(name, now)
        is_long = now - since >= ROOM_WAIT_S
        if is_pending:
            self._waiting_since[name] = since
            if is_long:
                self._note(name, f"{name} waits for room in the cluster")
        elif self._waiting_since.pop(name, None) is not None and is_long:
            self._lines.pop(name, None)

    def _note(self, name: str, line: str) -> None:
        line = _one_line(line)
        if name not in self._leaving and self._lines.get(name) != line:
            self._lines.pop(name, None)  # the newest is the last
            self._lines[name] = line

    def told(self, now: float) -> tuple[int, tuple[str, ...]]:
        """Return of which edition the lines are, and the newest of them, the newest first.

        Args:
            now: Seconds since the epoch.
        """
        lines = tuple(reversed(self._lines.values()))[:MAX_TROUBLES]
        if lines != self._told:
            self._told = lines
            self._edition = max(int(now), self._edition + 1)
        return self._edition, lines


def _one_line(text: str) -> str:
    """Return ``text`` less what would move a terminal's cursor, and not too long."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(printable.split())[:MAX_LINE]
