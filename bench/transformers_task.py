"""What the serving benchmark and its ``transformers`` child tell each other."""

import msgspec

from bench.samples import LoadPlan, LoadRun


class Task(msgspec.Struct, frozen=True):
    """What to run, and how many tokens the warm-up generates."""

    model: str
    plan: LoadPlan
    warm_up_tokens: int


class Runs(msgspec.Struct, frozen=True):
    """The repeats of each concurrency, and the child's peak resident memory."""

    by_concurrency: dict[int, list[LoadRun]]
    memory_mib: float
