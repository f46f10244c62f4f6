"""What one request asks of a block manager, and what this benchmark and vLLM's child exchange.

Only the standard library and msgspec: the child runs in vLLM's environment.
"""

import random

import msgspec

BLOCK_SIZE = 16
PROMPT_TOKENS = 8_192
APPENDED_TOKENS = 128
HIT_TOKENS = 6_544
"""The full blocks of the first 80 % of the prompt."""
REQUEST_BLOCKS = (PROMPT_TOKENS + APPENDED_TOKENS) // BLOCK_SIZE
OUTPUT_TOKEN = 5
_FIRST_SERIAL_TOKEN = 100_000
_SERIAL_DIGIT = 30_000
_BASE = random.Random(0).choices(range(_FIRST_SERIAL_TOKEN), k=PROMPT_TOKENS)


class Case(msgspec.Struct, frozen=True):
    """A pool, and how much of each request it knows already."""

    num_blocks: int
    hit_tokens: int
    is_full: bool
    """Whether every block is owned or cached, so that each admission must evict."""

    @property
    def name(self) -> str:
        """Return what the case is called in figures and ratios."""
        hit = "80 % hit" if self.hit_tokens else "cold"
        return f"{hit}, {self.num_blocks:,} blocks{', full' if self.is_full else ''}"


class Order(msgspec.Struct, frozen=True):
    """What the child is to do next: ``repeats`` requests in a pool of ``case``."""

    case: Case
    repeats: int


class Life(msgspec.Struct, frozen=True):
    """One request's time in a block manager, in microseconds of its thread's CPU time.

    The work neither waits nor uses a second thread, so the CPU time is what it costs, and what else
    runs on the machine hardly matters.
    """

    build_us: float
    """Making what names its content: a request with block hashes, or a token run."""
    admit_us: float
    """Lookup, admission, and offering the prompt's blocks to the cache."""
    append_us: float
    """All appends together."""
    release_us: float

    @property
    def manager_us(self) -> float:
        """All but the building."""
        return self.admit_us + self.append_us + self.release_us

    @property
    def whole_us(self) -> float:
        """All of it."""
        return self.build_us + self.manager_us


class Lives(msgspec.Struct, frozen=True):
    """The child's answer to an order."""

    lives: list[Life]


class UnexpectedHitError(Exception):
    """A lookup found another prefix than its case is about: its times would mean nothing."""


def prompt(serial: int, hit_tokens: int) -> list[int]:
    """Return the prompt of the request ``serial``: after ``hit_tokens`` it is like no other."""
    own = _BASE[hit_tokens:]
    own[0] = _FIRST_SERIAL_TOKEN + serial % _SERIAL_DIGIT
    own[1] = _FIRST_SERIAL_TOKEN + serial // _SERIAL_DIGIT
    return _BASE[:hit_tokens] + own


def num_filling_requests(num_blocks: int) -> int:
    """Return how many requests without a common prefix leave no block of a pool unused."""
    return num_blocks // REQUEST_BLOCKS + 2


def require_hit(found: int, case: Case) -> None:
    """Check that a lookup found what ``case`` says.

    Raises:
        UnexpectedHitError: it did not.
    """
    if found != case.hit_tokens:
        raise UnexpectedHitError(f"{case.name}: a lookup found {found} cached tokens")
