"""Prefill workers that have refused this one, or that it has refused. Pure."""

from collections import OrderedDict
from dataclasses import dataclass

from core.ids import Incarnation

STANDS_S = 30.0
"""What differs is final for both lives, but a refusal may also be of keys that are being replaced,
or of too many readers: a request asks again after this."""
MAX_KEPT = 1024


@dataclass(slots=True)
class _Refusal:
    reason: str
    until: float


class Refusals:
    """Spares requests a handshake whose end is known, and the log a line for each of them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Incarnation, _Refusal] = OrderedDict()

    def add(self, incarnation: Incarnation, reason: str, now: float) -> bool:
        """Return whether this is news, and not the same reason once more."""
        before = self._kept.pop(incarnation, None)
        self._kept[incarnation] = _Refusal(reason, now + STANDS_S)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return before is None or before.reason != reason

    def reason(self, incarnation: Incarnation, now: float) -> str | None:
        """Return why there is no use in asking now."""
        refusal = self._kept.get(incarnation)
        return refusal.reason if refusal is not None and now < refusal.until else None
