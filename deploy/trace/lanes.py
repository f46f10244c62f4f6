"""A request's way as lanes of bars and ticks: what every picture of it draws. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from deploy.trace.request import (
    Entry,
    Process,
    Read,
    RequestTrace,
    megabytes,
    milliseconds,
    reads_of,
)

Kind: TypeAlias = Literal["wait", "step", "read", "stream", "lease", "failure"]
MEANING: Final[dict[Kind, str]] = {
    "step": "model step",
    "read": "read of KV",
    "stream": "tokens stream",
    "wait": "waits",
    "lease": "held for the reader",
    "failure": "failure",
}
Mark: TypeAlias = Literal["ticket", "token", "end", "failure", "renewal"]


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that took time."""

    kind: Kind
    start_s: float
    end_s: float
    label: str = ""
    """Shown inside, where there is room."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Something that happened at a moment."""

    mark: Mark
    at_s: float
    detail: str


@dataclass(slots=True)
class Lane:
    """One process, or what it reads."""

    name: str
    note: str = ""
    bars: list[Bar] = field(default_factory=list[Bar])
    ticks: list[Tick] = field(default_factory=list[Tick])


@dataclass(frozen=True, slots=True)
class Hop:
    """A ticket's way from one lane to another."""

    from_lane: str
    to_lane: str
    sent_s: float
    received_s: float


def lanes_of(trace: RequestTrace) -> list[Lane]:
    """Return the router's lane, prefill's, decode's, and one of reads below each decode worker."""
    lanes: list[Lane] = []
    order = {"router": 0, "prefill": 1, "decode": 2}
    for process in sorted(trace.processes, key=lambda process: order[process.role]):
        lane = Lane(process.name, _note(process))
        lanes.append(lane)
        _FILL[process.role](lane, process, trace.end_s)
        reads = reads_of(process)
        if reads:
            lanes.append(_lane_of_reads(process, reads))
    return lanes


def hops_of(trace: RequestTrace) -> list[Hop]:
    """Return the tickets that arrived."""
    sent = {
        _piece(entry): (process.name, entry.at_s)
        for process in trace.processes
        for entry in process.events
        if entry.event == "ticket_sent"
    }
    return [
        Hop(sent[_piece(entry)][0], process.name, sent[_piece(entry)][1], entry.at_s)
        for process in trace.processes
        for entry in process.events
        if entry.event == "ticket" and _piece(entry) in sent
    ]


def tail_of(trace: RequestTrace) -> tuple[float, float] | None:
    """Return the time around the end of the last prefill step: where a transfer shows, or not."""
    steps = [entry.at_s for entry in trace.entries("step", role="prefill")]
    firsts = [entry.at_s for entry in trace.entries("first_token", role="router")]
    if not steps or not firsts or max(firsts) <= max(steps):
        return None
    length_s = max(firsts) - max(steps)
    return max(steps) - 0.4 * length_s, max(firsts) + 0.2 * length_s


def _note(process: Process) -> str:
    if process.status != "ok":
        return {"unknown": "nothing recorded", "unreachable": "did not answer"}[process.status]
    if process.role == "router":
        return "all times from the arrival here"
    return f"{process.role}, times ±{milliseconds(process.uncertainty_s)}"


def _piece(entry: Entry) -> tuple[float, ...]:
    names = ("chunk", "first_layer", "last_layer")
    return (entry.attempt, *(entry.number(name) for name in names))


def _fill_router(lane: Lane, process: Process, end_s: float) -> None:
    events = process.events
    lane.bars += _between(events, "arrived", ("tokenized",), "wait", "tokenizes", end_s)
    ends = ("first_token", "attempt_failed", "failed", "left")
    lane.bars += _between(events, "dispatched", ends, "wait", "waits for the first token", end_s)
    streaming = ("finished", "attempt_failed", "failed", "left")
    lane.bars += _between(events, "first_token", streaming, "stream", "streams", end_s)
    for entry in events:
        if entry.event == "first_token":
            lane.ticks.append(Tick("token", entry.at_s, "first token"))
        elif entry.event in ("attempt_failed", "failed", "left"):
            lane.ticks.append(Tick("failure", entry.at_s, _described(entry)))


def _fill_prefill(lane: Lane, process: Process, end_s: float) -> None:
    events = process.events
    lane.bars += _between(events, "received", ("admitted",), "wait", "queued", end_s)
    ends = ("released", "withdrawn", "expired")
    tickets = [entry for entry in events if entry.event == "ticket_sent"]
    lane.bars += _between(events, "ticket_sent", ends, "lease", "", end_s)
    _add_steps(lane, events)
    for entry in tickets:
        lane.ticks.append(Tick("ticket", entry.at_s, f"ticket sent: {_described(entry)}"))
    for entry in events:
        if entry.event in ends:
            lane.ticks.append(Tick("end", entry.at_s, entry.event))
        elif entry.event == "failed":
            lane.ticks.append(Tick("failure", entry.at_s, _described(entry)))


def _fill_decode(lane: Lane, process: Process, end_s: float) -> None:
    events = process.events
    over = ("delivered", "recomputing", "aborted", "failed")
    lane.bars += _between(events, "prefill_asked", over, "wait", "waits for KV", end_s)
    over = ("finished", "aborted", "failed")
    lane.bars += _between(events, "first_token", over, "stream", "decodes", end_s)
    _add_steps(lane, events)
    for entry in events:
        if entry.event == "ticket":
            lane.ticks.append(Tick("ticket", entry.at_s, f"ticket: {_described(entry)}"))
        elif entry.event == "lease_renewed":
            lane.ticks.append(Tick("renewal", entry.at_s, "lease renewed"))
        elif entry.event == "first_token":
            lane.ticks.append(Tick("token", entry.at_s, "first token"))
        elif entry.event in ("recomputing", "aborted", "failed"):
            lane.ticks.append(Tick("failure", entry.at_s, _described(entry)))


_FILL: Final[dict[str, Callable[[Lane, Process, float], None]]] = {
    "router": _fill_router,
    "prefill": _fill_prefill,
    "decode": _fill_decode,
}


def _add_steps(lane: Lane, events: list[Entry]) -> None:
    for entry in events:
        if entry.event == "step":
            tokens, seconds = int(entry.number("tokens")), entry.number("seconds")
            lane.bars.append(
                Bar(
                    "step",
                    entry.at_s - seconds,
                    entry.at_s,
                    f"{tokens:,} tokens",
                    f"step of {tokens:,} tokens, {milliseconds(seconds)}",
                )
            )


def _lane_of_reads(process: Process, reads: list[Read]) -> Lane:
    paths = sorted({read.path.replace("_", " ") for read in reads} - {"unknown"})
    lane = Lane("reads", ", ".join([f"by {process.name}", *paths]))
    for read in reads:
        layers = f"layers {read.layers[0]} to {read.layers[1]}"
        if read.failure is not None:
            detail = f"chunk {read.chunk}, {layers}: {read.failure}"
            lane.bars.append(Bar("failure", read.posted_at, read.ended_at, "failed", detail))
            continue
        descriptors = f"{read.num_descriptors} descriptor{'s' * (read.num_descriptors != 1)}"
        detail = (
            f"chunk {read.chunk}, {layers}: {megabytes(read.nbytes)} in {descriptors}, "
            f"{milliseconds(read.ended_at - read.posted_at)}, {read.gb_per_s:.1f} GB/s"
        )
        label = f"{megabytes(read.nbytes)}, {read.gb_per_s:.1f} GB/s"
        lane.bars.append(Bar("read", read.posted_at, read.ended_at, label, detail))
    return lane


def _between(
    events: list[Entry],
    start: str,
    ends: tuple[str, ...],
    kind: Kind,
    label: str,
    last_s: float,
) -> list[Bar]:
    """Return a bar from each ``start`` to the next of ``ends``, or to the very end."""
    bars: list[Bar] = []
    started: float | None = None
    for entry in events:
        if started is not None and entry.event in ends:
            bars.append(_bar(kind, started, entry.at_s, label))
            started = None
        elif started is None and entry.event == start:
            started = entry.at_s
    if started is not None:
        bars.append(_bar(kind, started, last_s, label))
    return bars


def _bar(kind: Kind, start_s: float, end_s: float, label: str) -> Bar:
    what = label or MEANING[kind]
    return Bar(kind, start_s, end_s, label, f"{what}, {milliseconds(end_s - start_s)}")


def _described(entry: Entry) -> str:
    values = ", ".join(f"{name} {value}" for name, value in entry.values.items())
    return f"{entry.event.replace('_', ' ')}: {values}" if values else entry.event
