"""``sluice top`` shows what is, in 80 columns, and no number that was not measured.

The failures guarded against: a rate since the start that hides a stall, a negative rate after a
restart, a worker that hangs taken for an idle one, a line that wraps.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from threading import Thread
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from rich.console import Console

from core.errors import SluiceError
from core.ids import WorkerId
from core.messages import Role, WorkerLoad
from deploy.api_client import RouterStatus, WorkerState, WorkerStatus
from deploy.cli.parser import run
from deploy.top.figures import WINDOW_S, Look, TopFigures, TopHistory
from deploy.top.samples import Samples, quantile
from deploy.top.view import BLOCK_CELLS, TopView, block_bar, lines_of

STATES = ("active", "leased", "fenced", "quarantined", "cached", "free")


def worker(name: str, role: Role = "decode", **load: int) -> WorkerStatus:
    return WorkerStatus(WorkerId(name), role, "ready", WorkerLoad(**load))


def decode_metrics(
    generated: int = 0, *, read: float = 0, looked_up: int = 0, hits: tuple[int, int] = (0, 0)
) -> Samples:
    return Samples(
        f'sluice_generation_tokens_total{{role="decode"}} {generated}\n'
        f'sluice_kv_transfer_bytes_total{{direction="pull",transport="ucx"}} {read}\n'
        f'sluice_prefix_cache_query_tokens_total{{role="decode",tier="device"}} {looked_up}\n'
        f'sluice_prefix_cache_hit_tokens_total{{role="decode",tier="device"}} {hits[0]}\n'
        f'sluice_prefix_cache_hit_tokens_total{{role="decode",tier="host"}} {hits[1]}\n'
        'sluice_kv_blocks{role="decode",tier="device",state="active"} 30\n'
        'sluice_kv_blocks{role="decode",tier="device",state="quarantined"} 1\n'
        'sluice_kv_blocks{role="decode",tier="device",state="free"} 69\n'
        'sluice_kv_transfers_in_flight{role="decode",peer_role="prefill"} 2\n'
        'sluice_kv_path_peers{role="decode",transport="ucx",path="rdma"} 3\n'
        'sluice_kv_path_peers{role="decode",transport="ucx",path="tcp"} 0\n'
    )


def look(at_s: float, workers: dict[str, Samples | None], router: str = "") -> Look:
    statuses = [
        worker(name, "prefill" if name.startswith("prefill") else "decode") for name in workers
    ]
    found = {WorkerId(name): samples for name, samples in workers.items() if samples is not None}
    status = RouterStatus("tiny", statuses, pending_requests=7)
    return Look(at_s, status, is_ready=True, router=Samples(router), workers=found)


def requests(**codes: int) -> str:
    return "".join(
        f'sluice_requests_total{{endpoint="/v1/completions",code="{code[1:]}"}} {count}\n'
        for code, count in codes.items()
    )


def text_of(figures: TopFigures, *, width: int = 80, with_details: bool = True) -> str:
    lines = lines_of(TopView(figures, "http://h:1"), width, with_details=with_details)
    assert max(line.cell_len for line in lines) <= width
    return "\n".join(line.plain for line in lines)


def test_rates_are_of_the_window_alone() -> None:
    history = TopHistory()
    history.add(look(0.0, {"decode-0": decode_metrics(10_000)}, requests(_200=100)))
    history.add(look(8.0, {"decode-0": decode_metrics(10_400)}, requests(_200=100)))
    figures = history.add(
        look(16.0, {"decode-0": decode_metrics(10_480)}, requests(_200=120, _503=8, _499=3))
    )

    assert figures.window_s == 8.0 <= WINDOW_S
    assert figures.workers[0].output_per_s == 10.0
    assert figures.output_per_s == 10.0
    assert figures.requests_per_s == 31 / 8
    assert figures.failures_per_s == 1.0


def test_looks_further_apart_than_the_window_are_compared_all_the_same() -> None:
    history = TopHistory()
    for at_s, num_tokens in ((0.0, 10_000), (30.0, 10_300), (60.0, 10_900)):
        figures = history.add(look(at_s, {"decode-0": decode_metrics(num_tokens)}))

    assert figures.window_s == 30.0 > WINDOW_S
    assert figures.output_per_s == 20.0


def test_the_first_look_has_no_rates() -> None:
    figures = TopHistory().add(look(5.0, {"decode-0": decode_metrics(900, read=1e9)}))

    (row,) = figures.workers
    assert (figures.requests_per_s, row.output_per_s, row.nbytes_per_s) == (None, None, None)
    assert "since its start" in text_of(figures)


def test_a_restarted_worker_counts_from_nothing() -> None:
    history = TopHistory()
    history.add(look(0.0, {"decode-0": decode_metrics(5_000)}))

    assert history.add(look(2.0, {"decode-0": decode_metrics(40)})).output_per_s == 20.0


def test_a_worker_that_joins_or_hangs_has_figures_of_its_own_time() -> None:
    history = TopHistory()
    history.add(look(0.0, {"decode-0": decode_metrics()}))
    history.add(look(4.0, {"decode-0": decode_metrics(), "decode-1": decode_metrics(100)}))
    figures = history.add(look(6.0, {"decode-0": None, "decode-1": decode_metrics(200)}))

    hangs, joined = figures.workers
    assert not hangs.is_answering
    assert joined.output_per_s == 50.0
    assert "its metrics do not answer" in text_of(figures)


def test_missing_workers_are_told_of_though_none_of_them_ever_reported() -> None:
    wanted = "".join(
        f'sluice_workers_desired{{role="{role}"}} {count}\n'
        for role, count in (("prefill", 1), ("decode", 3))
    )
    there: dict[str, Samples | None] = {"prefill-0": None, "decode-0": None}
    text = text_of(TopHistory().add(look(0.0, there, wanted)))
    assert "decode: 1 of 3 workers ready" in text
    assert "prefill: " not in text
    assert "workers ready" not in text_of(TopHistory().add(look(0.0, there)))


def test_who_stays_down_is_told_above_the_workers_the_newest_few_in_a_line_each() -> None:
    at = look(0.0, {"decode-0": None})
    trouble = tuple(f"decode-{9 - index} stays down: {'long ' * 40}" for index in range(5))
    status = msgspec.structs.replace(at.status, trouble=trouble)
    text = text_of(TopHistory().add(replace(at, status=status)))
    shown = re.findall(r"^decode-(\d) stays down: long", text, re.MULTILINE)
    assert shown == ["9", "8", "7"]
    assert text.index("stays down") < text.index("KV blocks")


def test_the_hit_rate_is_of_all_tiers_and_unknown_without_look_ups() -> None:
    history = TopHistory()
    before = decode_metrics(looked_up=1_000, hits=(1_000, 0))
    assert history.add(look(0.0, {"decode-0": before})).workers[0].hit_share is None
    after = decode_metrics(looked_up=1_200, hits=(1_030, 20))

    assert history.add(look(1.0, {"decode-0": after})).workers[0].hit_share == 0.25


@given(
    st.lists(st.floats(0, 2, exclude_max=True), min_size=1, max_size=50),
    st.lists(st.floats(0, 2, exclude_max=True), max_size=50),
    st.sampled_from((0.5, 0.99)),
)
def test_a_quantile_lies_in_the_bucket_of_what_was_observed_since(
    observed: list[float], before: list[float], share: float
) -> None:
    registry = CollectorRegistry()
    bounds = (0.1, 0.5, 1.0, 2.0)
    histogram = Histogram("t", "t", ["model"], buckets=bounds, registry=registry)
    scrapes: list[dict[float, float]] = []
    for values in (before, observed):
        for value in values:
            histogram.labels("m").observe(value)
        scrapes.append(Samples(generate_latest(registry).decode()).buckets("t"))

    found = quantile(share, scrapes[1], scrapes[0])

    rank = share * len(observed)
    least = next(b for b in bounds if sum(value <= b for value in observed) >= rank)
    floor = max((b for b in (0.0, *bounds) if b < least), default=0.0)
    assert found is not None
    assert floor - 1e-9 <= found <= least + 1e-9


def test_a_quantile_of_nothing_is_unknown_and_beyond_the_buckets_is_their_last() -> None:
    assert quantile(0.5, {}) is None
    assert quantile(0.5, {1.0: 4, float("inf"): 4}, {1.0: 4, float("inf"): 4}) is None
    assert quantile(0.5, {1.0: 0, 2.0: 0, float("inf"): 3}) == 2.0
    assert quantile(0.5, {1.0: 2, float("inf"): 2}, {1.0: 9, float("inf"): 9}) == 0.5


@given(st.dictionaries(st.sampled_from(STATES), st.integers(0, 5_000)), st.integers(6, 60))
def test_a_bar_is_as_wide_as_asked_and_shows_every_state_that_has_a_block(
    blocks: dict[str, int], width: int
) -> None:
    bar = block_bar(blocks, width)

    assert bar.cell_len == width
    shown = {str(span.style) for span in bar.spans if span.end > span.start}
    assert len(shown) == sum(count > 0 for count in blocks.values())


@pytest.mark.parametrize("width", [60, 80, 81, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    names = ("prefill-0", "decode-0", "decode-with-a-name-that-is-far-too-long-for-a-column-here")
    history = TopHistory()
    history.add(look(0.0, dict.fromkeys(names, decode_metrics())))
    busy = decode_metrics(10**9, read=4e12, looked_up=10, hits=(9, 1))
    figures = history.add(look(1.0, dict.fromkeys(names, busy)))

    text = text_of(figures, width=width)
    if width >= 80:
        assert "100%" in text
        assert "1 quarantined" in text
    assert text_of(figures, width=width, with_details=False).count("\n") < text.count("\n")


def test_what_a_decode_worker_does_is_told_in_two_lines() -> None:
    history = TopHistory()
    history.add(look(0.0, {"decode-0": decode_metrics()}))
    text = text_of(history.add(look(2.0, {"decode-0": decode_metrics(90, read=3e9)})))

    assert re.search(r"decode-0 +ready +0 +0 +0 +45 +- +█+!·+ +31%", text)
    assert "2 reads in flight, 1.50 GB/s, RDMA x3, 1 quarantined" in text
    assert "TCP" not in text


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [(0.0, "0.00 GB/s"), (5e6, "2.5 MB/s"), (0.19e9, "95.0 MB/s"), (0.2e9, "0.10 GB/s")],
)
def test_a_slow_transfer_is_not_shown_as_none(nbytes: float, told: str) -> None:
    history = TopHistory()
    history.add(look(0.0, {"decode-0": decode_metrics()}))
    figures = history.add(look(2.0, {"decode-0": decode_metrics(read=nbytes)}))
    assert f"in flight, {told}" in text_of(figures)


@pytest.mark.parametrize("state", get_args(WorkerState))
def test_a_worker_is_shown_in_whatever_state_a_router_says(state: WorkerState) -> None:
    gone = WorkerStatus(WorkerId("decode-0"), "decode", state, WorkerLoad(), silent_s=41.7)
    found = Look(0.0, RouterStatus("tiny", [gone]), is_ready=False, router=Samples(""), workers={})
    text = text_of(TopHistory().add(found))
    assert state in text
    assert ("not heard of for 42 s" in text) == (state == "lost")


def test_blocks_of_two_states_differ_without_colours() -> None:
    assert len({cell for _, cell, _ in BLOCK_CELLS}) == len(BLOCK_CELLS)


def test_a_terminal_that_is_too_low_drops_the_second_lines() -> None:
    names = [f"decode-{index}" for index in (10, 2, 1)]
    figures = TopHistory().add(look(0.0, dict.fromkeys(names, decode_metrics())))
    shown = StringIO()
    console = Console(file=shown, width=80, height=10, force_terminal=False)
    console.print(TopView(figures, "http://h:1", stale_reason="nothing answers"), height=10)

    text = shown.getvalue()
    assert "nothing answers" in text
    assert "no answer" in text.splitlines()[0]
    assert re.findall(r"decode-\d+", text) == ["decode-1", "decode-2", "decode-10"]
    assert "reads in flight" not in text


def test_a_router_without_workers_says_so() -> None:
    figures = TopHistory().add(look(0.0, {}))

    assert "no worker reports to this router" in text_of(figures)


def test_what_is_no_exposition_is_refused() -> None:
    with pytest.raises(SluiceError, match="Prometheus"):
        Samples("<html>{{{ not metrics")


@pytest.fixture
def stranger() -> Iterator[str]:
    """A web server that is no router."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_nothing_there_or_a_stranger_is_one_clear_error(
    stranger: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", "--once", "--url", "http://127.0.0.1:9"]) == 1
    assert run(["top", "--once", "--url", stranger]) == 1
    with pytest.raises(SystemExit):
        run(["top", "--interval", "0"])

    absent, strange, interval = capsys.readouterr().err.splitlines()
    assert "nothing answers at http://127.0.0.1:9" in absent
    assert "is not a Sluice router" in strange
    assert "--interval: '0' is not a number of seconds from 0.1 to 3600" in interval
