"""Who does not serve and why, in lines for an operator. Pure: the time comes in as an argument.

A line is told from what has happened to a service and what was decided about it, until it serves,
or is there no more. The end of what has been sent away is no trouble.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from core.messages.serving import MAX_TROUBLES
from deploy.supervision.desired import Kill, Observed, Start
from deploy.supervision.events import Event, GaveUp, ProcessDied, ProcessStarted, ServiceEnded

MAX_LINE = 400
"""Characters."""
ROOM_WAIT_S = 30.0
"""What Ray has not placed for so long waits for room: a process of its own takes some seconds."""
MAX_NAMES = 3
"""Of those who wait for room, which can be hundreds after a slip of a finger."""

REFUSES = "refuses to start"
STAYS_DOWN = "stays down"


@dataclass(slots=True)
class _Story:
    """Of one service."""

    line: str | None = None
    """None: there is nothing to tell."""
    reason: str | None = None
    """What its last process ended of; None also once it serves."""
    ordered: str | None = None
    """Why the death was ordered of which it has not been heard yet."""
    is_leaving: bool = False
    pending_since: float | None = None
    waits_for_room: bool = False


class Troubles:
    """Remembers the last reason of each service that has one."""

    def __init__(self, now: float) -> None:
        """Begin at ``now``, seconds since the epoch: a later controller's word is the newer."""
        self._stories: dict[str, _Story] = {}
        """By name, those with the newest lines last."""
        self._told: tuple[str, ...] = ()
        self._edition = int(now)

    def is_ordered(self, name: str) -> bool:
        """Return whether the death of this one was ordered, so that it is no news."""
        return name in self._stories and self._stories[name].ordered is not None

    def order(self, kill: Kill) -> None:
        """Note that the end of its process is ordered."""
        story = self._story(kill.name)
        story.ordered = kill.reason
        story.is_leaving |= kill.is_unwanted

    def start(self, start: Start) -> None:
        """Note that it is started, or started anew."""
        story = self._story(start.name)
        if not start.deaths:
            # What it refused, if anything, was another config.
            story.line = story.reason = None
            return
        times = f" {start.deaths} times in a row" if start.deaths > 1 else ""
        reason = story.ordered or story.reason
        why = f": {reason}" if reason else ""
        self._note(start.name, f"{start.name} died{times} and is started anew{why}")

    def forget(self, name: str) -> None:
        """Forget all of it: who has the name next is another one."""
        self._stories.pop(name, None)

    def hear(self, event: Event) -> Event:
        """Note what has happened; return it, with the last reason where a service is given up."""
        match event:
            case ProcessDied(name, reason):
                story = self._story(name)
                story.reason, story.ordered = story.ordered or reason, None
            case ServiceEnded(name, error):
                story = self._story(name)
                story.ordered = None
                if error is not None:
                    story.reason = error
                    self._note(name, f"{name} {REFUSES}: {error}")
            case GaveUp(name, reason):
                if (last := self._story(name).reason) is not None:
                    event = GaveUp(name, _one_line(f"{reason}: {last}"))
                self._note(name, f"{name} {STAYS_DOWN}: {event.reason}")
            case ProcessStarted(name, _):
                story = self._story(name)
                if not story.is_leaving:  # else it was sent away while it started
                    story.ordered = None
            case _:
                pass
        return event

    def see(self, now: float, observed: Mapping[str, Observed]) -> None:
        """Forget whom there is not, drop what is told of those who serve, see who waits for room.

        Args:
            now: Monotonic seconds.
            observed: All services by name.
        """
        for name in self._stories.keys() - observed.keys():
            self.forget(name)
        for name, seen in observed.items():
            story = self._story(name)
            if seen.state == "draining":
                story.is_leaving = True
            if seen.state in {"ready", "draining"}:
                story.line = story.reason = None
            self._see_waiting(now, story, is_pending=seen.state == "pending")

    def _see_waiting(self, now: float, story: _Story, *, is_pending: bool) -> None:
        if not is_pending:
            story.pending_since, story.waits_for_room = None, False
        elif story.pending_since is None:
            story.pending_since = now
        else:
            is_long = now - story.pending_since >= ROOM_WAIT_S
            story.waits_for_room = is_long and not story.is_leaving

    def _story(self, name: str) -> _Story:
        return self._stories.setdefault(name, _Story())

    def _note(self, name: str, line: str) -> None:
        story, line = self._story(name), _one_line(line)
        if not story.is_leaving and story.line != line:
            story.line = line
            self._stories[name] = self._stories.pop(name)  # the newest is the last

    def told(self, now: float) -> tuple[int, tuple[str, ...]]:
        """Return of which edition the lines are, and the newest of them, the newest first.

        Last comes one for all who wait for room: what else is wrong is not lost among them.

        Args:
            now: Seconds since the epoch.
        """
        newest_first = [story.line for story in reversed(self._stories.values()) if story.line]
        waiting = self._waiting()
        room = MAX_TROUBLES - len(waiting)
        if len(newest_first) > room:
            left_out = len(newest_first) - (room - 1)
            newest_first[room - 1 :] = [f"and {left_out} more; see the controller's log"]
        lines = (*newest_first, *waiting)
        if lines != self._told:
            self._told = lines
            self._edition = max(int(now), self._edition + 1)
        return self._edition, lines

    def _waiting(self) -> list[str]:
        names = sorted(name for name, story in self._stories.items() if story.waits_for_room)
        if not names:
            return []
        shown = ", ".join(names[:MAX_NAMES])
        others = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        verb = "wait" if len(names) > 1 else "waits"
        return [f"{shown}{others} {verb} for room in the cluster"]


def who_stays_down(lines: Iterable[str]) -> set[str]:
    """Return the names of those who stay down or refuse to start, as the ``lines`` tell."""
    parts = [line.partition(" ") for line in lines]
    return {name for name, _, rest in parts if rest.startswith((f"{REFUSES}:", f"{STAYS_DOWN}:"))}


def _one_line(text: str) -> str:
    """Return ``text`` less what would move a terminal's cursor, and not too long."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(printable.split())[:MAX_LINE]
