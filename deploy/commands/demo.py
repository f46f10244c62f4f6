"""``sluice demo``: start a deployment, stream five answers, show how each was served, stop."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from core.config import SluiceConfig
from core.errors import SluiceError
from core.logs import set_up_logging
from deploy.api_client import ApiClient
from deploy.commands.demo_prompts import DEMO_PROMPTS, DemoPrompt
from deploy.deployment import Deployment, running
from deploy.exit_codes import EXIT_INTERRUPTED
from deploy.supervision.stop_signals import StopInterrupt

REQUEST_TIMEOUT_S = 120.0
"""Between two tokens of an answer."""
SHOWN_CHARACTERS = 56


@dataclass(frozen=True, slots=True)
class DemoResult:
    """How one prompt was served."""

    prompt: DemoPrompt
    input_tokens: int
    output_tokens: int
    ttft_s: float
    """From the request to its first text."""
    itl_s: float | None
    """Mean time between tokens after the first; None for one token."""
    stats: dict[str, Any]
    """``RequestStats`` as the router sends it."""

    @property
    def path(self) -> str:
        """``local`` or ``disaggregated``."""
        return str(self.stats.get("path", "unknown"))


def run_demo(config: SluiceConfig) -> int:
    """Run the demo and return 0, or 1 if a request failed or took the wrong path.

    Raises:
        ConfigError: nothing was started, or it was ended again.
        SluiceError: a request failed; everything is stopped.
    """
    config = config.model_copy(update={"log_level": _calm(config.log_level)})
    set_up_logging(config.log_level, worker="deploy", role="deploy", log_format=config.log_format)
    console = Console()
    try:
        with running(config, console) as deployment:
            try:
                with deployment.interruptible():
                    results = [_answer(deployment, prompt, console) for prompt in DEMO_PROMPTS]
            except StopInterrupt:
                console.print("\ninterrupted")
                return EXIT_INTERRUPTED
            console.print(_table(results))
    except StopInterrupt:
        return EXIT_INTERRUPTED
    check_paths(results, config)
    return 0


def _calm(level: str) -> str:
    """Return ``level``, but for info: progress lines tell that."""
    return "warning" if level == "info" else level


def check_paths(results: Sequence[DemoResult], config: SluiceConfig) -> None:
    """Check that the long prompt went through a prefill worker, in several chunks.

    Raises:
        SluiceError: it did not, though there is a prefill worker.
    """
    if config.deploy.prefill == 0:
        return
    for result in results:
        if not result.prompt.long:
            continue
        if result.path != "disaggregated":
            raise SluiceError(f"{result.prompt.title!r} was served {result.path}, not by prefill")
        several_chunks = result.input_tokens > config.scheduler.max_batch_tokens
        if several_chunks and int(result.stats.get("num_tickets", 0)) < 2:  # noqa: PLR2004
            raise SluiceError(f"{result.prompt.title!r} came with a single ticket, not in chunks")


def _answer(deployment: Deployment, prompt: DemoPrompt, console: Console) -> DemoResult:
    console.print(f"\n[bold]{prompt.title}[/bold]: {_shortened(prompt.content)}", highlight=False)
    client = deployment.client.with_timeout(REQUEST_TIMEOUT_S)
    model = client.json("/v1/models")["data"][0]["id"]
    return _stream_answer(client, model, prompt, console)


def _shortened(text: str) -> str:
    flat = " ".join(text.split())
    if len(flat) <= SHOWN_CHARACTERS:
        return flat
    return f"{flat[: SHOWN_CHARACTERS // 2]} ... {flat[-SHOWN_CHARACTERS // 2 :]}"


def _stream_answer(
    client: ApiClient, model: str, prompt: DemoPrompt, console: Console
) -> DemoResult:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt.content}],
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, int] = {}
    stats: dict[str, Any] = {}
    text_times_s: list[float] = []
    started_s = time.monotonic()
    for chunk in client.stream("/v1/chat/completions", body):
        usage = chunk.get("usage") or usage
        stats = chunk.get("sluice") or stats
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                text_times_s.append(time.monotonic())
                console.out(text, end="", highlight=False)
    console.out("")
    return _result(prompt, usage, stats, [t - started_s for t in text_times_s])


def _result(
    prompt: DemoPrompt, usage: dict[str, int], stats: dict[str, Any], text_times_s: list[float]
) -> DemoResult:
    if not text_times_s or not usage:
        raise SluiceError(f"{prompt.title!r} was answered without text or without usage")
    output_tokens = usage["completion_tokens"]
    gaps = output_tokens - 1
    return DemoResult(
        prompt=prompt,
        input_tokens=usage["prompt_tokens"],
        output_tokens=output_tokens,
        ttft_s=text_times_s[0],
        itl_s=(text_times_s[-1] - text_times_s[0]) / gaps if gaps > 0 else None,
        stats=stats,
    )


def _table(results: Sequence[DemoResult]) -> Table:
    table = Table(
        title="How each answer was served", box=box.SIMPLE_HEAD, padding=0, pad_edge=False
    )
    for name in ("prompt", "path"):
        table.add_column(name, no_wrap=True)
    for name in ("in", "out", "TTFT ms", "ITL ms", "KV moved", "tickets"):
        table.add_column(name, justify="right")
    table.add_column("transport")
    for result in results:
        table.add_row(
            result.prompt.title,
            result.path,
            str(result.input_tokens),
            str(result.output_tokens),
            f"{result.ttft_s * 1000:.0f}",
            "-" if result.itl_s is None else f"{result.itl_s * 1000:.1f}",
            _size(int(result.stats.get("kv_nbytes", 0))),
            str(result.stats.get("num_tickets", 0) or "-"),
            str(result.stats.get("transport", "")) or "-",
        )
    return table


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes else "-"
