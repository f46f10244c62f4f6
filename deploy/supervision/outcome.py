"""What becomes of a command that changes what is wanted. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Taken:
    """It is stored, and carried out from now on."""

    advice: str = ""
    """What is unwise in it, in one line; "": nothing."""


@dataclass(frozen=True, slots=True)
class Unchanged:
    """All that it asks for is wanted already: nothing was stored, and nothing will be done."""


@dataclass(frozen=True, slots=True)
class Refused:
    """It cannot be; what was wanted before still is."""

    reason: str
    """With the value that cannot be and what to do, in one line."""


Outcome = Taken | Unchanged | Refused
