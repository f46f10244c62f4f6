"""What ``sluice doctor`` found: one line each, with what to do about it."""

from typing import Final, Literal, TypeAlias

import msgspec

Level: TypeAlias = Literal["ok", "warn", "fail"]
_ORDER: Final[dict[Level, int]] = {"ok": 0, "warn": 1, "fail": 2}


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that was looked at."""

    name: str
    level: Level
    text: str
    """What is so."""
    fix: str | None = None
    """What to do; None where nothing needs to be done."""


def worst(findings: list[Finding]) -> Level:
    """Return the worst level among ``findings``, of which there is at least one."""
    return max((finding.level for finding in findings), key=lambda level: _ORDER[level])
