"""What the arguments of ``sluice scale`` say. Loads no Ray: a wrong one is told at once."""

from collections.abc import Sequence
from typing import get_args

from core.errors import ConfigError
from core.messages import Role

MAX_WORKERS = 10_000
"""Of one role."""
MAX_SHOWN = 40
"""Characters of an argument that an error repeats."""


def parse_counts(texts: Sequence[str]) -> dict[Role, int]:
    """Return the numbers in ``prefill=3``.

    Raises:
        ConfigError: names the text that is none.
    """
    counts: dict[Role, int] = {}
    for text in texts:
        role, _, number = text.partition("=")
        if role not in get_args(Role) or not (number.isascii() and number.isdecimal()):
            raise ConfigError(f"{_short(text)!r}: write prefill=N or decode=N, such as decode=5")
        digits = number.lstrip("0") or "0"
        # By its length first: Python reads no number of thousands of digits.
        if len(digits) > len(str(MAX_WORKERS)) or int(digits) > MAX_WORKERS:
            raise ConfigError(f"{_short(text)!r}: write {role}=N with N at most {MAX_WORKERS}")
        key: Role = "prefill" if role == "prefill" else "decode"
        if key in counts:
            raise ConfigError(f"{_short(text)!r}: {key} is given twice; write {key}=N once")
        counts[key] = int(digits)
    if counts.get("decode") == 0:
        raise ConfigError("decode=0: one decode worker has to stay; use sluice down to end all")
    return counts


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def parse_roles(texts: Sequence[str]) -> dict[str, Role]:
    """Return the new roles in ``prefill-1=decode``, by worker.

    Raises:
        ConfigError: names the text that is none.
    """
    roles: dict[str, Role] = {}
    for text in texts:
        name, _, role = text.partition("=")
        if not name or role not in get_args(Role):
            raise ConfigError(f"--role {_short(text)}: write WORKER=ROLE, such as prefill-1=decode")
        if name in roles:
            raise ConfigError(f"--role {_short(text)}: {name} is given twice; give it one role")
        roles[name] = "prefill" if role == "prefill" else "decode"
    return roles
