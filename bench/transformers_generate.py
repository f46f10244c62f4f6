"""``transformers`` ``generate`` with static batches, in a process of its own.

Run by the serving benchmark: reads its task as JSON from the file named first, writes its samples
to the file named second. Each batch starts when the one before has ended; all requests of a batch
start together and are of one length, so nothing is padded.
"""

import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from bench.load import load_seed, make_prompt
from bench.samples import LoadPlan, LoadRun, RequestSample
from bench.transformers_task import Runs, Task


class _StepClock(LogitsProcessor):
    """Notes when the logits of each step are there; they must stay as they are."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:  # noqa: ANN401, ARG002
        if scores.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return scores


def _load(folder: str) -> Any:  # noqa: ANN401 - transformers' models are untyped
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None  # as ignore_eos does
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _run_batches(model: Any, plan: LoadPlan, batch: int, rounds: int, seed: str) -> LoadRun:  # noqa: ANN401
    prompts = torch.tensor(
        [
            [make_prompt(plan.prompt_tokens, f"{seed}/{row}/{turn}") for row in range(batch)]
            for turn in range(rounds)
        ],
        device=model.device,
    )
    samples: list[RequestSample] = []
    started = time.perf_counter()
    for prompt in prompts:
        samples += _run_batch(model, prompt, plan.output_tokens)
    return LoadRun(started, time.perf_counter(), samples)


def _run_batch(model: Any, prompts: torch.Tensor, tokens: int) -> list[RequestSample]:  # noqa: ANN401
    clock = _StepClock()
    sent = time.perf_counter()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        logits_processor=LogitsProcessorList([clock]),
    )
    sample = RequestSample(sent, tuple(clock.times), len(clock.times))
    if len(clock.times) != tokens:
        sample = RequestSample(sent, (), 0, f"{len(clock.times)} tokens instead of {tokens}")
    return [sample] * len(prompts)


def main() -> None:
    """Carry out one task."""
    task_file, result_file = map(Path, sys.argv[1:])
    task = msgspec.json.decode(task_file.read_bytes(), type=Task)
    plan, model = task.plan, _load(task.model)
    warm_up = replace(plan, output_tokens=task.warm_up_tokens)
    runs: dict[int, list[LoadRun]] = {}
    with torch.inference_mode():
        for batch in plan.concurrency:
            _run_batches(model, warm_up, batch, 1, f"warm-up/{batch}")
            runs[batch] = []
            for repeat in range(plan.repeats):
                run = _run_batches(
                    model, plan, batch, plan.rounds_at(batch), load_seed(batch, repeat)
                )
                runs[batch].append(run)
                print(f"c{batch} repeat {repeat + 1}/{plan.repeats} done", flush=True)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result_file.write_bytes(msgspec.json.encode(Runs(runs, peak_kib / 1024)))


if __name__ == "__main__":
    main()
