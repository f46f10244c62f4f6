"""A closed loop of requests through a decode worker's own parts, in one process and one thread.

The scheduler, the block manager and the engine are those that serve. Steps follow each other as in
a worker: the next one is scheduled before the output of the last is read. Nothing waits, so times
are CPU time of the process: what a core to itself would need, whatever else runs beside. No
decision goes by a clock, so two runs of one plan make the same decisions.
"""

import time
from dataclasses import dataclass, field

import msgspec

from bench.figures import Figures, run_figures
from bench.load import make_prompt
from bench.samples import LoadRun, RequestSample
from blockmgr.block_manager import BlockManager
from blockmgr.states import BlockState
from core.config import SchedulerConfig
from core.ids import Attempt, Owner, RequestId
from core.kv_layout import KVLayout
from core.sampling import SamplingParams
from decode.scheduler import DecodeScheduler
from decode.sequence import Progress, Sequence
from engine.batch import StepBatch
from engine.startup import Engine

_NO_TOKEN_LEAVES = 2**30
"""A window longer than any sequence."""


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """What both sides serve. No two prompts share a prefix."""

    clients: int
    """Each sends its next request when its last has ended."""
    rounds: int
    """Requests of each client."""
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class ServingRun:
    """One load served to its end."""

    load: LoadRun
    outputs: dict[str, list[int]]
    """Token ids by request."""
    num_pruned_blocks: int
    """Released because they fell behind a window."""
    num_lost_blocks: int
    """Neither FREE nor CACHED when everything had ended."""
    num_preemptions: int
    num_steps: int
    num_step_sequences: int
    """Sequences of all steps together."""

    def figures(self) -> Figures:
        """Return what is compared and what explains it."""
        return run_figures(self.load) | {
            "pruned_blocks": self.num_pruned_blocks,
            "lost_blocks": self.num_lost_blocks,
            "preemptions": self.num_preemptions,
            "sequences_per_step": self.num_step_sequences / self.num_steps,
        }


def keep_everything(layout: KVLayout) -> KVLayout:
    """Return ``layout`` as a block manager sees it that never looks at windows.

    Attention goes by the engine's own layout, so the numbers that it computes stay the same.
    """
    groups = tuple(
        group if group.window is None else msgspec.structs.replace(group, window=_NO_TOKEN_LEAVES)
        for group in layout.groups
    )
    return msgspec.structs.replace(layout, groups=groups)


@dataclass(slots=True)
class _Request:
    """One request under way."""

    client: int
    turn: int
    sent: float
    arrivals: list[float] = field(default_factory=list[float])


class Service:
    """Serves one plan, once.

    Args:
        engine: Its pool and slots are taken over; nothing of an earlier run is read again.
        layout: As the block manager sees it.
        config: Of the scheduler.
        seed: Of the prompts.
    """

    def __init__(
        self,
        engine: Engine,
        layout: KVLayout,
        config: SchedulerConfig,
        plan: ServingPlan,
        *,
        seed: str,
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._seed = seed
        self._blocks = BlockManager(
            layout, engine.pool.num_blocks, fences=True, prefix_caching=True
        )
        self._scheduler = DecodeScheduler(
            self._blocks, layout, config, fingerprint=engine.spec.fingerprint
        )
        self._requests: dict[Owner, _Request] = {}
        self._samples: list[RequestSample] = []
        self._outputs: dict[str, list[int]] = {}

    def run(self) -> ServingRun:
        """Serve everything."""
        num_steps = num_parts = 0
        started = time.process_time()
        for client in range(self._plan.clients):
            self._send(client, turn=0)
        batch = self._scheduler.schedule()
        while batch is not None:
            following = self._scheduler.schedule()
            self._run_step(batch)
            num_steps += 1
            num_parts += len(batch.sequences)
            batch = following or self._scheduler.schedule()
        ended = time.process_time()
        counts = self._blocks.counts()
        idle = counts[BlockState.FREE] + counts[BlockState.CACHED]
        return ServingRun(
            load=LoadRun(started, ended, self._samples),
            outputs=self._outputs,
            num_pruned_blocks=self._blocks.stats.pruned_blocks,
            num_lost_blocks=self._blocks.num_blocks - idle,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=num_steps,
            num_step_sequences=num_parts,
        )

    def _run_step(self, batch: StepBatch) -> None:
        output = self._engine.runner.run(batch)
        now = time.process_time()
        for progress in self._scheduler.complete(output):
            request = self._requests[progress.sequence.owner]
            request.arrivals.append(now)
            if progress.finish_reason is not None:
                self._end(progress, request)

    def _send(self, client: int, *, turn: int) -> None:
        name = f"{client}/{turn}"
        owner = (RequestId(name), Attempt(1))
        sequence = Sequence(
            owner=owner,
            prompt_token_ids=tuple(make_prompt(self._plan.prompt_tokens, f"{self._seed}/{name}")),
            sampling=SamplingParams(seed=0, max_tokens=self._plan.output_tokens, temperature=0),
        )
        self._requests[owner] = _Request(client, turn, time.process_time())
        self._scheduler.add(sequence, remote=False)

    def _end(self, progress: Progress, request: _Request) -> None:
        owner = progress.sequence.owner
        output = progress.sequence.output_token_ids
        self._outputs[owner[0]] = list(output)
        self._samples.append(RequestSample(request.sent, tuple(request.arrivals), len(output)))
        del self._requests[owner]
        if request.turn + 1 < self._plan.rounds:
            self._send(request.client, turn=request.turn + 1)
