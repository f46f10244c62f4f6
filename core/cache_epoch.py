"""Names of what a reset of the prefix caches begins. The newest of several is the greatest.

Whoever names one has to know the newest up to then; two that are named at once are told apart by
who named them, and all who hear of both agree on which of them is the newer one.
"""

import re
from collections.abc import Iterable
from typing import Final

_DIGITS: Final = 12
_FORM: Final = re.compile(rf"([0-9]{{{_DIGITS}}})-\w+", re.ASCII)


def is_epoch(text: str) -> bool:
    """Return whether ``text`` was made by ``epoch_after``."""
    return _FORM.fullmatch(text) is not None


def newest_epoch(epochs: Iterable[str]) -> str:
    """Return the newest of ``epochs``, of which those of another form do not count; "": none."""
    return max(filter(is_epoch, epochs), default="")


def epoch_after(epoch: str, *, by: str) -> str:
    """Return an epoch that is newer than ``epoch``.

    Args:
        epoch: The newest that is known; "": none.
        by: Who names it, in letters and digits; no two name the same.
    """
    match = _FORM.fullmatch(epoch)
    number = 1 if match is None else int(match[1]) + 1
    return f"{number:0{_DIGITS}}-{by}"
