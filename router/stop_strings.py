"""Stop strings in streamed text: found across pieces, never shown, not even in part."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopScan:
    """What one piece of text gave."""

    text: str
    """May be shown: no stop string begins in it."""
    stop: str | None = None
    """The stop string that ended the text."""


class StopStringMatcher:
    """Looks for the first stop string to be completed, as if characters came one by one.

    The result does not depend on how the text is cut into pieces. Of several stop strings that
    are completed by the same character the longest counts. Held back at any time is the longest
    end of the text that begins some stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    @property
    def held(self) -> str:
        """Text seen and not yet returned."""
        return self._held

    def feed(self, piece: str) -> StopScan:
        """Return what may be shown after ``piece``; nothing more may follow a stop."""
        if not self._stops:
            return StopScan(piece)
        text = self._held + piece
        match = self._first_completed(text)
        if match is not None:
            self._held = ""
            start, stop = match
            return StopScan(text[:start], stop)
        keep = self._unfinished(text)
        self._held = text[len(text) - keep :]
        return StopScan(text[: len(text) - keep])

    def flush(self) -> str:
        """Return the text held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(stop), stop) for stop in self._stops]
        matches = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _unfinished(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that begins a stop string."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
