"""One request's way as the router tells it, and the figures that matter of it. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from core.messages import Role
from core.trace import EventName, Value

MAX_NAMES_SHOWN: Final = 3
"""Of the sequences of one response: more are wider than the picture."""


class Entry(msgspec.Struct, frozen=True):
    """Something that happened, by the router's clock."""

    at_s: float
    """From the request's arrival at the router."""
    event: str
    """A ``core.trace.EventName``, or one of a newer version."""
    attempt: int
    values: dict[str, Value] = {}

    def number(self, name: str) -> float:
        """Return one of its numbers; 0 where it has none of that name."""
        value = self.values.get(name, 0)
        return 0.0 if isinstance(value, str) else float(value)


class Process(msgspec.Struct, frozen=True):
    """What one process recorded."""

    name: str
    role: Role | Literal["router"]
    status: Literal["ok", "unknown", "unreachable"]
    """unknown: it has nothing of this request, or no more; unreachable: it did not answer."""
    uncertainty_s: float
    """All its times may be off by so much, the same way."""
    events: list[Entry]


class RequestTrace(msgspec.Struct, frozen=True):
    """The answer of ``GET /v1/trace/{name}``."""

    request_id: str
    choices: list[str]
    """The sequences of the same response by their index, this one included."""
    processes: list[Process]

    def entries(self, *names: EventName, role: str | None = None) -> Iterator[Entry]:
        """Yield the entries of those names, of one role or all, by time within each process."""
        for process in self.processes:
            if role is None or process.role == role:
                yield from (entry for entry in process.events if entry.event in names)

    @property
    def start_s(self) -> float:
        """Time of the first entry; a worker's clock may put it before the arrival."""
        return min(entry.at_s for process in self.processes for entry in process.events)

    @property
    def end_s(self) -> float:
        """Time of the last entry."""
        return max(entry.at_s for process in self.processes for entry in process.events)


@dataclass(frozen=True, slots=True)
class Read:
    """One read of KV by decode."""

    posted_at: float
    ended_at: float
    chunk: int
    layers: tuple[int, int]
    """First and last."""
    nbytes: int
    num_descriptors: int
    path: str
    failure: str | None

    @property
    def gb_per_s(self) -> float:
        """Bytes by the time from the post until its end was seen."""
        duration_s = self.ended_at - self.posted_at
        return self.nbytes / duration_s / 1e9 if duration_s > 0 else 0.0


def reads_of(process: Process) -> list[Read]:
    """Return the reads of a decode worker that are over, in order of their ends."""
    posted = {entry.number("operation"): entry for entry in process.events if _is_post(entry)}
    return [
        Read(
            posted_at=posted[entry.number("operation")].at_s,
            ended_at=entry.at_s,
            chunk=int(posted[entry.number("operation")].number("chunk")),
            layers=(
                int(posted[entry.number("operation")].number("first_layer")),
                int(posted[entry.number("operation")].number("last_layer")),
            ),
            nbytes=int(entry.number("nbytes")),
            num_descriptors=int(entry.number("descriptors")),
            path=str(entry.values.get("path", "unknown")),
            failure=str(entry.values["reason"]) if entry.event == "read_failed" else None,
        )
        for entry in process.events
        if entry.event in ("read_landed", "read_failed") and entry.number("operation") in posted
    ]


def _is_post(entry: Entry) -> bool:
    return entry.event == "read_posted"


@dataclass(frozen=True, slots=True)
class Figures:
    """What an operator wants to know first. None: it did not come to that."""

    num_prompt_tokens: int
    num_output_tokens: int | None
    first_token_s: float | None
    """From the arrival to the first token at the router."""
    total_s: float | None
    num_steps: int
    steps_s: float
    """Of the prompt's steps, on whichever worker."""
    kv_nbytes: int
    num_reads: int
    reading_s: float
    """Sum of the reads' durations."""
    paths: tuple[str, ...]
    exposed_s: float | None
    """From the end of the prompt's last step until decode may use its KV: what of the transfer no
    computation hides. None where nothing was transferred."""


def figures_of(trace: RequestTrace) -> Figures:
    """Return the figures of ``trace``; of the last attempt where they differ."""
    steps = list(trace.entries("step"))
    reads = [read for process in trace.processes for read in reads_of(process)]
    landed = [read for read in reads if read.failure is None]
    delivered = _last(trace, "delivered")
    computed = [entry.at_s for entry in trace.entries("step", role="prefill")]
    first_token = _last(trace, "first_token", role="router")
    finished = _last(trace, "finished", role="router")
    return Figures(
        num_prompt_tokens=int(sum(e.number("tokens") for e in trace.entries("tokenized"))),
        num_output_tokens=None if finished is None else int(finished.number("tokens")),
        first_token_s=None if first_token is None else first_token.at_s,
        total_s=None if finished is None else finished.at_s,
        num_steps=len(steps),
        steps_s=sum(entry.number("seconds") for entry in steps),
        kv_nbytes=sum(read.nbytes for read in landed),
        num_reads=len(landed),
        reading_s=sum(read.ended_at - read.posted_at for read in landed),
        paths=tuple(sorted({read.path for read in landed})),
        exposed_s=(
            None if delivered is None or not computed else max(0.0, delivered.at_s - max(computed))
        ),
    )


def _last(trace: RequestTrace, name: EventName, role: str | None = None) -> Entry | None:
    return max(trace.entries(name, role=role), key=lambda entry: entry.at_s, default=None)


def sisters_of(trace: RequestTrace) -> str | None:
    """Return which choice of its response this is, and the names of all; None: the only one."""
    choices = trace.choices
    if len(choices) < 2 or trace.request_id not in choices:  # noqa: PLR2004 - it and another
        return None
    names = (
        ", ".join(choices) if len(choices) <= MAX_NAMES_SHOWN else f"{choices[0]} to {choices[-1]}"
    )
    return f"choice {choices.index(trace.request_id)}, of 0 to {len(choices) - 1}: {names}"


def summary_of(figures: Figures) -> list[str]:
    """Return the figures as two or three short lines."""
    lines = [f"{figures.num_prompt_tokens:,} prompt tokens"]
    if figures.num_output_tokens is not None:
        lines[0] += f", {figures.num_output_tokens:,} output tokens"
    if figures.first_token_s is not None:
        lines[0] += f"; first token after {milliseconds(figures.first_token_s)}"
    if figures.total_s is not None:
        lines[0] += f", all after {milliseconds(figures.total_s)}"
    if figures.num_steps:
        steps = f"{figures.num_steps} step{'s' * (figures.num_steps > 1)}"
        lines.append(f"prompt computed in {steps}, {milliseconds(figures.steps_s)}")
    if figures.num_reads:
        rate = figures.kv_nbytes / figures.reading_s / 1e9 if figures.reading_s else 0.0
        reads = f"{figures.num_reads} read{'s' * (figures.num_reads > 1)}"
        paths = ", ".join(path.replace("_", " ") for path in figures.paths if path != "unknown")
        lines.append(
            f"KV: {megabytes(figures.kv_nbytes)} in {reads}{' over ' * bool(paths)}{paths}, "
            f"{milliseconds(figures.reading_s)}, {rate:.1f} GB/s"
        )
    if figures.exposed_s is not None:
        lines.append(
            f"not hidden behind computation: {milliseconds(figures.exposed_s)} from the end of "
            "the last step until decode has all KV"
        )
    return lines


def milliseconds(seconds: float) -> str:
    """Return ``seconds`` with about three significant digits: 0.24 ms, 5.3 ms, 1,361 ms."""
    value = seconds * 1e3
    digits = 2 if abs(value) < 1 else 1 if abs(value) < 100 else 0  # noqa: PLR2004 - as it says
    return f"{value:,.{digits}f} ms"


def megabytes(nbytes: float) -> str:
    """Return ``nbytes`` in decimal megabytes."""
    return f"{nbytes / 1e6:,.1f} MB"
