"""The picture of a request shows what happened, to scale, and breaks on nothing that did.

The failure guarded against: the one request that somebody has to understand (it was retried, its
worker is gone, its read failed) is the one that cannot be drawn.
"""

import io
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from deploy.cli.parser import run
from deploy.trace.command import CONVERTER, write_png
from deploy.trace.lanes import hops_of, lanes_of, tail_of
from deploy.trace.request import RequestTrace, figures_of, reads_of, sisters_of, summary_of
from deploy.trace.svg import CHAR, WIDTH, draw
from deploy.trace.terminal import print_trace

Raw = tuple[float, str, dict[str, object]]

ROUTER: list[Raw] = [
    (0.0, "arrived", {}),
    (0.001, "tokenized", {"tokens": 1024}),
    (0.002, "dispatched", {"decode": "decode-0", "prefill": "prefill-0", "reason": "long"}),
    (0.930, "first_token", {}),
    (1.100, "finished", {"tokens": 8, "reason": "length"}),
]
PREFILL: list[Raw] = [
    (0.004, "received", {"tokens": 1024, "first_token": 0}),
    (0.005, "admitted", {"tokens": 0}),
    (0.405, "step", {"seconds": 0.4, "tokens": 512, "first": 0}),
    (0.406, "ticket_sent", {"chunk": 0, "first_layer": 0, "last_layer": 29, "blocks": 32}),
    (0.905, "step", {"seconds": 0.5, "tokens": 512, "first": 512}),
    (0.906, "ticket_sent", {"chunk": 1, "first_layer": 0, "last_layer": 29, "blocks": 32}),
    (0.926, "released", {}),
]
DECODE: list[Raw] = [
    (0.003, "received", {"tokens": 1024}),
    (0.003, "prefill_asked", {"peer": "prefill-0", "first_token": 0}),
    (0.407, "ticket", {"chunk": 0, "first_layer": 0, "last_layer": 29, "blocks": 32}),
    (0.408, "read_posted", {"operation": 1, "chunk": 0, "first_layer": 0, "last_layer": 29}),
    (0.418, "read_landed", {"operation": 1, "nbytes": 50_000_000, "descriptors": 3, "path": "tcp"}),
    (0.907, "ticket", {"chunk": 1, "first_layer": 0, "last_layer": 29, "blocks": 32}),
    (0.908, "read_posted", {"operation": 2, "chunk": 1, "first_layer": 0, "last_layer": 29}),
    (0.918, "read_landed", {"operation": 2, "nbytes": 50_000_000, "descriptors": 1, "path": "tcp"}),
    (0.925, "delivered", {"nbytes": 100_000_000, "tickets": 2}),
    (0.929, "first_token", {}),
    (1.099, "finished", {"tokens": 8, "reason": "length", "preemptions": 0}),
]


def process(name: str, entries: list[Raw], *, status: str = "ok") -> dict[str, object]:
    events = [
        {"at_s": at_s, "event": event, "attempt": 1, "values": values}
        for at_s, event, values in entries
    ]
    return {
        "name": name,
        "role": name.partition("-")[0],
        "status": status,
        "uncertainty_s": 0.0003,
        "events": events,
    }


def trace_of(*processes: dict[str, object]) -> RequestTrace:
    content = {"request_id": "cmpl-1-0", "choices": ["cmpl-1-0"], "processes": processes}
    return msgspec.convert(content, RequestTrace)


WHOLE = trace_of(
    process("router", ROUTER), process("prefill-0", PREFILL), process("decode-0", DECODE)
)


def texts(svg: str) -> list[str]:
    root = ET.fromstring(svg)  # noqa: S314 - drawn here
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def printed(trace: RequestTrace, *, width: int = 120) -> str:
    out = io.StringIO()
    print_trace(trace, Console(file=out, width=width))
    return out.getvalue()


def test_the_figures_tell_what_a_transfer_cost_beyond_computation() -> None:
    figures = figures_of(WHOLE)
    assert (figures.num_prompt_tokens, figures.num_output_tokens) == (1024, 8)
    assert figures.first_token_s == pytest.approx(0.930)
    assert (figures.num_steps, figures.num_reads) == (2, 2)
    assert figures.kv_nbytes == 100_000_000
    assert figures.paths == ("tcp",)
    assert figures.exposed_s == pytest.approx(0.020)
    lines = "\n".join(summary_of(figures))
    assert "100.0 MB in 2 reads over tcp, 20.0 ms, 5.0 GB/s" in lines
    assert "not hidden behind computation: 20.0 ms" in lines


def test_lanes_have_router_prefill_decode_and_its_reads_from_top_to_bottom() -> None:
    lanes = lanes_of(WHOLE)
    assert [lane.name for lane in lanes] == ["router", "prefill-0", "decode-0", "reads"]
    steps = [(bar.start_s, bar.end_s) for bar in lanes[1].bars if bar.kind == "step"]
    assert steps == [pytest.approx((0.005, 0.405)), pytest.approx((0.405, 0.905))]
    reads = [(bar.start_s, bar.end_s) for bar in lanes[3].bars]
    assert reads == [(0.408, 0.418), (0.908, 0.918)]
    assert [(hop.from_lane, hop.to_lane) for hop in hops_of(WHOLE)] == [
        ("prefill-0", "decode-0")
    ] * 2


def test_the_enlarged_part_is_around_the_end_of_the_last_step() -> None:
    tail = tail_of(WHOLE)
    assert tail is not None
    start, end = tail
    assert start < 0.905
    assert 0.930 < end < WHOLE.end_s


def test_the_picture_is_well_formed_and_names_what_it_shows() -> None:
    shown = texts(draw(WHOLE))
    for text in ("cmpl-1-0", "router", "prefill-0", "decode-0", "reads", "model step", "released"):
        assert text in shown
    assert any("enlarged" in text for text in shown)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_terminal_shows_every_entry_at_any_width(width: int) -> None:
    shown = printed(WHOLE, width=width)
    assert shown.count("ticket sent") == 2
    assert shown.count("read landed") == 2


def cut(entries: list[Raw], event: str) -> list[Raw]:
    """Return the entries before the first ``event``."""
    index = next(i for i, entry in enumerate(entries) if entry[1] == event)
    return entries[:index]


FAILED_READ = (
    0.420,
    "read_failed",
    {"operation": 1, "reason": 'peer <gone> & "lost"'},
)
ODD = {
    "only arrived": trace_of(process("router", ROUTER[:1])),
    "local": trace_of(
        process("router", ROUTER),
        process(
            "decode-0",
            [
                (0.003, "received", {"tokens": 9}),
                (0.1, "step", {"seconds": 0.09, "tokens": 9}),
                (0.1, "first_token", {}),
            ],
        ),
    ),
    "prefill is gone": trace_of(
        process("router", ROUTER),
        process("prefill-0", [], status="unreachable"),
        process("decode-0", DECODE),
    ),
    "forgotten": trace_of(process("router", ROUTER), process("decode-0", [], status="unknown")),
    "a read failed": trace_of(
        process("router", [*cut(ROUTER, "first_token"), (0.5, "failed", {"reason": "<lost>"})]),
        process("prefill-0", [*cut(PREFILL, "released"), (30.9, "expired", {})]),
        process(
            "decode-0",
            [*cut(DECODE, "read_landed"), FAILED_READ, (0.421, "failed", {"kind": "transfer"})],
        ),
    ),
    "still running": trace_of(
        process("router", cut(ROUTER, "first_token")),
        process("prefill-0", PREFILL[:3]),
        process("decode-0", DECODE[:4]),
    ),
    "a worker's clock is behind": trace_of(
        process("router", ROUTER), process("decode-0", [(-0.002, "received", {"tokens": 9})])
    ),
    "renewed": trace_of(
        process("router", ROUTER),
        process("decode-0", [*DECODE[:4], (0.5, "lease_renewed", {}), (0.6, "aborted", {})]),
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_whatever_happened_can_be_drawn(name: str) -> None:
    trace = ODD[name]
    texts(draw(trace))
    printed(trace)


def test_a_failed_read_is_drawn_as_one_with_its_reason() -> None:
    trace = ODD["a read failed"]
    (read,) = reads_of(trace.processes[2])
    assert read.failure == 'peer <gone> & "lost"'
    (bar,) = lanes_of(trace)[3].bars
    assert bar.kind == "failure"
    assert "peer &lt;gone&gt; &amp;" in draw(trace)


def test_what_is_drawn_is_in_the_legend() -> None:
    assert "lease renewed" in texts(draw(ODD["renewed"]))
    assert "lease renewed" not in texts(draw(WHOLE))
    assert "failure" in texts(draw(ODD["a read failed"]))


def test_no_entry_of_the_legend_is_cut_by_the_end_of_a_line() -> None:
    lines = printed(WHOLE, width=44).splitlines()
    for meaning in ("held for the reader", "tokens stream", "model step", "read of KV"):
        assert any(meaning in line for line in lines), meaning


def test_a_line_of_the_summary_that_is_too_long_goes_on_below_its_begin() -> None:
    lines = printed(WHOLE, width=60).splitlines()
    first = next(i for i, line in enumerate(lines) if "not hidden behind" in line)
    assert lines[first + 1].startswith("  ")


def test_a_worker_that_did_not_answer_is_named() -> None:
    assert "prefill-0: did not answer" in printed(ODD["prefill is gone"])
    assert "decode-0: has nothing of this request" in printed(ODD["forgotten"])


def test_the_names_of_all_sequences_are_no_wider_than_the_picture() -> None:
    response = "chatcmpl-8c7acab83ca00533-f34b8e4647a562ec"
    for number in (2, 3, 4, 128):
        choices = [f"{response}-{index}" for index in range(number)]
        trace = msgspec.structs.replace(WHOLE, request_id=choices[0], choices=choices)
        assert len(sisters_of(trace) or "") * CHAR < WIDTH


def one_of(index: int, number: int) -> RequestTrace:
    """Return the trace of one of ``number`` sequences."""
    choices = [f"cmpl-1-{position}" for position in range(number)]
    return msgspec.structs.replace(WHOLE, request_id=choices[index], choices=choices)


def test_one_sequence_of_several_is_shown_with_its_sisters_and_how_to_choose_one() -> None:
    told = "choice 1, of 0 to 2: cmpl-1-0, cmpl-1-1, cmpl-1-2"
    assert f"{told}; --choice N shows another" in printed(one_of(1, 3))
    assert told in texts(draw(one_of(1, 3)))
    assert "choice 7, of 0 to 127: cmpl-1-0 to cmpl-1-127;" in printed(one_of(7, 128))
    assert "choice" not in printed(WHOLE) + draw(WHOLE)


def test_a_png_that_cannot_be_made_here_is_said_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/does/not/exist")
    assert run(["trace", "cmpl-1", "--url", "http://127.0.0.1:1", "--out", "way.png"]) == 2
    assert "a PNG needs rsvg-convert" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which(CONVERTER) is None, reason=f"{CONVERTER} is not installed")
def test_a_png_is_one(tmp_path: Path) -> None:
    out = tmp_path / "way.png"
    write_png(WHOLE, out)
    assert out.read_bytes().startswith(b"\x89PNG")
