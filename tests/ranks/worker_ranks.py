"""The ranks of one worker, started for real: processes, collectives, steps."""

import queue
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from core.channel_keys import DeploymentKeys
from core.config import SluiceConfig
from core.errors import StepFailedError
from core.ids import WorkerId, new_incarnation
from core.messages.base import Role
from core.worker_context import WorkerContext
from engine.batch import StepBatch, StepOutput
from engine.executor import StepExecutor
from ranks.leader import Ranks

DEADLINE_S = 60.0
LOST = r"rank 1 of this worker (ended|is gone)"
"""Its exit code is told where the kernel has it in time: the pipes close a moment before."""
NUM_BLOCKS = 96
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"dtype": "float32", "device": "cpu"},
    "cache": {"block_size": 8, "num_blocks": NUM_BLOCKS},
    "scheduler": {"max_num_seqs": 6},
    "engine": {"tensor_parallel_size": 2, "num_threads": 1},
}


def context_of(model: Path, **sections: dict[str, Any]) -> WorkerContext:
    return WorkerContext(
        worker_id=WorkerId("decode-0"),
        config=SluiceConfig.parse(SECTIONS | sections, source="test"),
        model_path=model,
        served_name="model",
        router_address="tcp://127.0.0.1:1",
        keys=DeploymentKeys.generate().of("decode"),
        host="127.0.0.1",
    )


@asynccontextmanager
async def started(model: Path, role: Role = "decode", **sections: Any) -> AsyncIterator[Ranks]:
    """Start a worker's ranks, and hold that none is left at the end."""
    ranks = await Ranks.start(context_of(model, **sections), role, incarnation=new_incarnation())
    processes = followers()
    try:
        yield ranks
    finally:
        await ranks.close()
    assert not [process for process in processes if process.is_running()]


def followers(parent: int | None = None) -> list[psutil.Process]:
    """Return the followers of this process, or of ``parent``."""
    return [child for child in psutil.Process(parent).children() if _is_follower(child)]


def _is_follower(child: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(child.cmdline())
    except psutil.NoSuchProcess:  # or a zombie: another test's process has ended just now
        return False


class Steps:
    """Runs batches on all ranks, as a worker does."""

    def __init__(self, ranks: Ranks) -> None:
        self._results: queue.Queue[StepOutput | StepFailedError] = queue.Queue()
        self.executor = StepExecutor(
            ranks.engine.runner, lambda _, result: self._results.put(result)
        )

    def submit(self, batches: Iterable[StepBatch]) -> None:
        for batch in batches:
            self.executor.submit(batch)

    def next(self) -> StepOutput | StepFailedError:
        return self._results.get(timeout=DEADLINE_S)

    def close(self) -> None:
        self.executor.close(timeout_s=DEADLINE_S)
