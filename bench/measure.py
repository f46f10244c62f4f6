"""Runs the same load on one system after another, each alone and wholly stopped before the next."""

import asyncio
import signal
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import msgspec
import psutil

from bench.figures import Figures, combine, run_figures
from bench.load import load_seed, run_load
from bench.process_tree import (
    ProcessTree,
    cpu_seconds,
    descendants,
    kill_descendants,
    memory_mib,
)
from bench.samples import LoadPlan, LoadRun
from bench.systems import SERVED_NAME, ServedSystem
from bench.transformers_task import Runs, Task

WARM_UP_TOKENS = 16
_ROOT = Path(__file__).parents[1]
_STOP_TIMEOUT_S = 30.0
_SETTLE_S = 1.0
_IDLE_S = 3.0
_GENERATE_TIMEOUT_S = 1_800.0


@dataclass(slots=True)
class Result:
    """What was measured of one system."""

    by_concurrency: dict[int, Figures] = field(default_factory=dict[int, Figures])
    processes: Figures = field(default_factory=dict[str, float])
    """Of the system as a whole: start and stop time, memory, CPU while idle."""
    problems: list[str] = field(default_factory=list[str])


def say(text: str) -> None:
    """Show progress; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def measure_served(system: ServedSystem, plan: LoadPlan, logs: Path) -> Result:
    """Start ``system``, measure it, stop it.

    Raises:
        StartError: it could not be started. Nothing of it is left then either.
    """
    result = Result()
    with _running(system, result, logs):
        for concurrency in plan.concurrency:
            asyncio.run(
                _load(
                    system.url,
                    replace(plan, output_tokens=WARM_UP_TOKENS),
                    concurrency,
                    "warm-up",
                    rounds=1,
                )
            )
            runs: list[LoadRun] = []
            for repeat in range(plan.repeats):
                run = asyncio.run(
                    _load(
                        system.url,
                        plan,
                        concurrency,
                        load_seed(concurrency, repeat),
                        rounds=plan.rounds_at(concurrency),
                    )
                )
                runs.append(run)
                _show(system.name, concurrency, f"repeat {repeat + 1}/{plan.repeats}", run)
            _record(result, system.name, concurrency, runs)
            _note_memory(result)
        result.processes["idle_cores"] = _idle_cores()
    return result


def measure_transformers(model: Path, plan: LoadPlan, logs: Path) -> Result:
    """Measure ``generate`` in a child process, which ends with it.

    Raises:
        StartError: the child failed.
    """
    result = Result()
    task, samples = logs / "transformers-task.json", logs / "transformers-samples.json"
    task.write_bytes(msgspec.json.encode(Task(str(model), plan, WARM_UP_TOKENS)))
    command = [sys.executable, "-m", "bench.transformers_generate", str(task), str(samples)]
    say("transformers: running static batches")
    with _all_stopped(result):
        child = ProcessTree(
            command,
            environment={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
            cwd=_ROOT,
            log=logs / "transformers.log",
        )
        child.wait(timeout_s=_GENERATE_TIMEOUT_S)
    found = msgspec.json.decode(samples.read_bytes(), type=Runs)
    result.processes["memory_mib"] = found.memory_mib
    for concurrency, runs in found.by_concurrency.items():
        for number, run in enumerate(runs):
            _show("transformers", concurrency, f"repeat {number + 1}/{plan.repeats}", run)
        _record(result, "transformers", concurrency, runs)
    return result


@contextmanager
def _running(system: ServedSystem, result: Result, logs: Path) -> Generator[None]:
    """Keep ``system`` running; afterwards none of its processes is left."""
    trees: list[ProcessTree] = []
    with _all_stopped(result, trees):
        say(f"{system.name}: starting")
        started = time.monotonic()
        trees.extend(
            ProcessTree(
                server.command,
                environment=server.environment,
                cwd=_ROOT,
                log=logs / f"{system.name}-{server.name}.log",
            )
            for server in system.servers
        )
        for server, tree in zip(system.servers, trees, strict=True):
            tree.wait_ready(
                lambda url=server.ready_url: _answers(url), timeout_s=system.start_timeout_s
            )
        result.processes["start_s"] = time.monotonic() - started
        say(f"{system.name}: ready after {result.processes['start_s']:.0f} s")
        yield


@contextmanager
def _all_stopped(result: Result, trees: list[ProcessTree] | None = None) -> Generator[None]:
    try:
        yield
    finally:
        with _uninterrupted():
            started = time.monotonic()
            for tree in trees or ():
                tree.terminate()
            deadline = started + _STOP_TIMEOUT_S
            while descendants() and time.monotonic() < deadline:
                for tree in trees or ():
                    tree.ended_within(0.0)
                psutil.wait_procs(descendants(), timeout=0.5)
            result.processes["stop_s"] = time.monotonic() - started
            result.processes["killed_processes"] = kill_descendants()


@contextmanager
def _uninterrupted() -> Generator[None]:
    """Hold Ctrl-C off: what is inside is bounded, and half of it would leave processes."""
    with ExitStack() as restore:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, signal.SIG_IGN)
            restore.callback(signal.signal, number, before)
        yield


def _idle_cores() -> float:
    """Return the CPUs in use once the last answer's work is done."""
    time.sleep(_SETTLE_S)
    before = cpu_seconds(descendants())
    time.sleep(_IDLE_S)
    return (cpu_seconds(descendants()) - before) / _IDLE_S


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False


async def _load(url: str, plan: LoadPlan, concurrency: int, seed: str, *, rounds: int) -> LoadRun:
    return await run_load(
        url,
        model=SERVED_NAME,
        concurrency=concurrency,
        rounds=rounds,
        prompt_tokens=plan.prompt_tokens,
        output_tokens=plan.output_tokens,
        seed=seed,
    )


def _show(system: str, concurrency: int, repeat: str, run: LoadRun) -> None:
    figures = run_figures(run)
    shown = ", ".join(
        f"{label} {figures[name]:.1f}"
        for name, label in (
            ("output_tok_s", "tok/s"),
            ("ttft_ms_p50", "TTFT p50"),
            ("itl_ms_p50", "ITL p50"),
            ("itl_ms_p99", "ITL p99"),
        )
        if name in figures
    )
    say(f"{system}: c{concurrency} {repeat}: {shown}")


def _record(result: Result, system: str, concurrency: int, runs: list[LoadRun]) -> None:
    result.by_concurrency[concurrency] = combine([run_figures(run) for run in runs])
    samples = [sample for run in runs for sample in run.samples]
    failures = [sample.failure for sample in samples if sample.failure is not None]
    if failures:
        count = f"{len(failures)} of {len(samples)} requests failed"
        result.problems.append(f"{system} c{concurrency}: {count}: {failures[0]}")
        say(result.problems[-1])


def _note_memory(result: Result) -> None:
    """Keep the highest memory seen between loads, so that no load is disturbed by the look."""
    seen = memory_mib(descendants())
    result.processes["memory_mib"] = max(seen, result.processes.get("memory_mib", 0.0))
