"""What a reserve for growth costs and saves under overload: real schedulers, virtual device time.

``python -m bench.admission`` lets the decode scheduler and the block manager serve one queue that
is always longer than the pool, once per reserve. A step takes ``STEP_COST`` plus ``TOKEN_COST``
per token; nobody knows in advance when a sequence will stop. Progress goes to standard error; the
last line of standard output is one JSON object.
"""

import argparse
import json
import random
import statistics
import sys
from collections import deque
from dataclasses import asdict, dataclass

from bench.machine import describe_machine
from blockmgr.block_manager import BlockManager
from core.config import SchedulerConfig
from core.ids import Attempt, RequestId, Slot
from core.kv_layout import KVGroup, KVLayout
from core.sampling import SamplingParams
from decode.scheduler import DecodeScheduler
from decode.sequence import Sequence
from engine.batch import SampledToken, StepBatch, StepOutput

STEP_COST, TOKEN_COST = 1.0, 1 / 64
"""Virtual time: a step that decodes 64 sequences takes twice as long as an empty one would."""
STOP, OTHER = 1, 2
LAYOUT = KVLayout((KVGroup(layers=(0,)),), 16, num_kv_heads=1, head_dim=4, dtype="float32")
MAX_TOKENS = 1024
FIRST_TOKEN_ID = 1000


@dataclass(frozen=True, slots=True)
class Reserve:
    """One setting of the admission."""

    name: str
    initial: int
    minimum: int
    decay_steps: int = 64


DEFAULT = "4 to 1 (default)"
RESERVES = (
    Reserve("none", initial=0, minimum=0),
    Reserve("1 always", initial=1, minimum=1),
    Reserve("4 always", initial=4, minimum=4),
    Reserve("16 always", initial=16, minimum=16),
    Reserve(DEFAULT, initial=4, minimum=1),
    Reserve("4 to 0", initial=4, minimum=0),
    Reserve("8 to 1", initial=8, minimum=1),
    Reserve("16 to 1", initial=16, minimum=1),
    Reserve("16 to 1 in steps of 16", initial=16, minimum=1, decay_steps=16),
)


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of 16 to 512 tokens, and outputs whose length nobody knows."""

    name: str
    max_output: int
    num_blocks: int


LOADS = (
    Load("long outputs", max_output=768, num_blocks=600),
    Load("medium outputs", max_output=256, num_blocks=600),
    Load("short outputs", max_output=77, num_blocks=300),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one queue served to its end."""

    output_tokens_per_time: float
    preemptions_per_request: float
    recomputed_share: float
    """Of all computed tokens, those beyond the first computation of each position."""
    sequences_per_step: float


class Service:
    """A decode scheduler, and a device that completes its steps in order."""

    def __init__(self, load: Load, reserve: Reserve, *, num_requests: int, seed: int) -> None:
        blocks = BlockManager(LAYOUT, load.num_blocks, fences=True, prefix_caching=True)
        self._config = SchedulerConfig(
            reserve_blocks_initial=reserve.initial,
            reserve_blocks_min=reserve.minimum,
            reserve_decay_steps=reserve.decay_steps,
        )
        self._scheduler = DecodeScheduler(blocks, LAYOUT, self._config, fingerprint="bench")
        self._sequences: list[Sequence] = []
        self._lengths: list[int] = []
        self._index_of_slot: dict[Slot, int] = {}
        rng = random.Random(seed)
        for index in range(num_requests):
            num_output = rng.randint(load.max_output // 48, load.max_output)
            self._add(index, num_prompt=rng.randint(16, 512), num_output=num_output)

    def run(self) -> Outcome:
        """Serve the whole queue."""
        in_flight: deque[tuple[StepBatch, dict[Slot, int]]] = deque()
        time, num_computed, num_steps, num_parts = 0.0, 0, 0, 0
        while True:
            while len(in_flight) < self._config.overlap_depth:
                if (batch := self._schedule()) is None:
                    break
                in_flight.append((batch, dict(self._index_of_slot)))
            if not in_flight:
                break
            batch, indices = in_flight.popleft()
            time += STEP_COST + TOKEN_COST * batch.num_tokens
            num_computed += batch.num_tokens
            num_steps += 1
            num_parts += len(batch.sequences)
            self._complete(batch, indices)
        num_output = sum(self._lengths)
        num_needed = num_output + sum(len(s.prompt_token_ids) - 1 for s in self._sequences)
        return Outcome(
            output_tokens_per_time=num_output / time,
            preemptions_per_request=self._scheduler.num_preemptions / len(self._sequences),
            recomputed_share=(num_computed - num_needed) / num_computed,
            sequences_per_step=num_parts / num_steps,
        )

    def _add(self, index: int, *, num_prompt: int, num_output: int) -> None:
        first = FIRST_TOKEN_ID + index  # tells the sequences apart, and shares no prefix
        sequence = Sequence(
            owner=(RequestId(f"R{index}"), Attempt(1)),
            prompt_token_ids=(first, *([OTHER] * (num_prompt - 1))),
            sampling=SamplingParams(seed=1, max_tokens=MAX_TOKENS, stop_token_ids=(STOP,)),
        )
        self._scheduler.add(sequence, remote=False)
        self._sequences.append(sequence)
        self._lengths.append(num_output)

    def _schedule(self) -> StepBatch | None:
        batch = self._scheduler.schedule()
        for opening in batch.openings if batch else ():
            self._index_of_slot[opening.slot] = opening.prompt_token_ids[0] - FIRST_TOKEN_ID
        return batch

    def _complete(self, batch: StepBatch, indices: dict[Slot, int]) -> None:
        tokens: list[SampledToken] = []
        for part in batch.sequences:
            if part.sample:
                index = indices[part.slot]
                num_outputs = len(self._sequences[index].output_token_ids) + 1
                is_last = num_outputs >= self._lengths[index]
                tokens.append(SampledToken(part.slot, STOP if is_last else OTHER))
        self._scheduler.complete(StepOutput(batch.step, tuple(tokens), 0.0))


def measure(load: Load, reserve: Reserve, *, num_requests: int, seeds: int) -> Outcome:
    """Return the mean over ``seeds`` queues."""
    outcomes = [
        asdict(Service(load, reserve, num_requests=num_requests, seed=seed).run())
        for seed in range(seeds)
    ]
    return Outcome(**{name: statistics.mean(o[name] for o in outcomes) for name in outcomes[0]})


def main() -> None:
    """Measure every reserve on the same queues."""
    parser = argparse.ArgumentParser(prog="python -m bench.admission", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    num_requests, seeds = (100, 1) if parser.parse_args().quick else (300, 3)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for load in LOADS:
        print(load.name, file=sys.stderr)
        of_load = figures[load.name] = {}
        for reserve in RESERVES:
            outcome = measure(load, reserve, num_requests=num_requests, seeds=seeds)
            of_load[reserve.name] = {key: round(at, 3) for key, at in asdict(outcome).items()}
            print(f"  {reserve.name:24}", of_load[reserve.name], file=sys.stderr, flush=True)
    speed = "output_tokens_per_time"
    gains = [of[DEFAULT][speed] / of["none"][speed] for of in figures.values()]
    ratios = {"throughput_over_no_reserve": round(statistics.geometric_mean(gains), 3)}
    report = {"bench": "admission", "ratios": ratios, "figures": figures}
    print(json.dumps({**report, "machine": describe_machine()}))


if __name__ == "__main__":
    main()
