"""What ``sluice top`` shows, computed from looks at a router and its workers. No I/O here."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from core.ids import WorkerId
from core.messages import Role
from deploy.api_client import RouterStatus, WorkerStatus
from deploy.top.samples import Samples, increase, quantile

WINDOW_S: Final = 10.0
"""Rates and latencies are of this time, of all looks if they are younger, or since the look before
if that is older."""
GENERATIONS: Final = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True)
class Look:
    """What was found at one moment."""

    at_s: float
    """Of a monotonic clock."""
    status: RouterStatus
    is_ready: bool
    router: Samples
    workers: Mapping[WorkerId, Samples]
    """Of those whose metrics answered."""


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker's line."""

    status: WorkerStatus
    is_answering: bool
    """Whether its metrics could be read now; if not, all below is empty."""
    input_per_s: float | None = None
    """Prompt tokens, wherever their KV came from. Rates are None before the second look."""
    output_per_s: float | None = None
    hit_share: float | None = None
    """Of the prompt tokens looked up, those that a tier of the prefix cache had; None: none
    were looked up."""
    blocks: Mapping[str, int] | None = None
    """By state."""
    reads_in_flight: int = 0
    nbytes_per_s: float | None = None
    read_p99_s: float | None = None
    leases: int = 0
    paths: Mapping[str, int] | None = None
    """Workers that are read from, by how their bytes travel."""


@dataclass(frozen=True, slots=True)
class TopFigures:
    """One picture of a deployment."""

    status: RouterStatus
    is_ready: bool
    window_s: float
    """0 at the first look."""
    requests_per_s: float | None
    failures_per_s: float | None
    """Generations answered with a status of 500 or more."""
    input_per_s: float | None
    output_per_s: float | None
    """As decode workers sample them."""
    ttft_s: tuple[float | None, float | None]
    """p50 and p99; None: no first token in the window."""
    itl_s: tuple[float | None, float | None]
    workers: tuple[WorkerFigures, ...]
    """Prefill first."""
    num_desired: Mapping[str, int]
    """Workers that are wanted, by role; of none: no worker was told yet."""

    def of_role(self, role: Role) -> list[WorkerFigures]:
        """Return the workers of ``role``, by id."""
        return [worker for worker in self.workers if worker.status.role == role]


class TopHistory:
    """The looks of the last ``WINDOW_S``, and one at least."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque()

    def add(self, look: Look) -> TopFigures:
        """Return the figures of ``look`` against what was found before."""
        while len(self._looks) > 1 and look.at_s - self._looks[0].at_s > WINDOW_S:
            self._looks.popleft()
        self._looks.append(look)
        first = self._looks[0]
        workers = tuple(
            self._worker(status, look)
            for status in sorted(
                look.status.workers, key=lambda w: (w.role != "prefill", _natural(w.worker_id))
            )
        )
        span_s = look.at_s - first.at_s
        decode = [w.output_per_s for w in workers if w.status.role == "decode"]
        return TopFigures(
            status=look.status,
            is_ready=look.is_ready,
            window_s=span_s,
            requests_per_s=_rate(_requests(first.router), _requests(look.router), span_s),
            failures_per_s=_rate(_failures(first.router), _failures(look.router), span_s),
            input_per_s=_rate(
                first.router.total("sluice_input_tokens_sum"),
                look.router.total("sluice_input_tokens_sum"),
                span_s,
            ),
            output_per_s=_sum(decode),
            ttft_s=_quantiles("sluice_time_to_first_token_seconds", first.router, look.router),
            itl_s=_quantiles("sluice_inter_token_latency_seconds", first.router, look.router),
            workers=workers,
            num_desired={
                role: int(count)
                for role, count in look.router.by_label("sluice_workers_desired", "role").items()
            },
        )

    def _worker(self, status: WorkerStatus, look: Look) -> WorkerFigures:
        now = look.workers.get(status.worker_id)
        if now is None:
            return WorkerFigures(status, is_answering=False)
        first = next(each for each in self._looks if status.worker_id in each.workers)
        before = first.workers[status.worker_id]
        span_s = look.at_s - first.at_s

        def rate(name: str) -> float | None:
            return _rate(before.total(name), now.total(name), span_s)

        looked_up, hit = (
            increase(before.total(name), now.total(name))
            for name in (
                "sluice_prefix_cache_query_tokens_total",
                "sluice_prefix_cache_hit_tokens_total",
            )
        )
        seconds = "sluice_kv_transfer_seconds"
        return WorkerFigures(
            status,
            is_answering=True,
            input_per_s=rate("sluice_prompt_tokens_total"),
            output_per_s=rate("sluice_generation_tokens_total"),
            hit_share=min(hit / looked_up, 1.0) if looked_up else None,
            blocks=_counts(now.by_label("sluice_kv_blocks", "state")),
            reads_in_flight=int(now.total("sluice_kv_transfers_in_flight")),
            nbytes_per_s=rate("sluice_kv_transfer_bytes_total"),
            read_p99_s=quantile(0.99, now.buckets(seconds), before.buckets(seconds)),
            leases=int(now.total("sluice_kv_leases")),
            paths=_counts(now.by_label("sluice_kv_path_peers", "path")),
        )


def _rate(before: float, now: float, span_s: float) -> float | None:
    return increase(before, now) / span_s if span_s > 0 else None


def _sum(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _requests(router: Samples) -> float:
    return sum(router.total("sluice_requests_total", endpoint=endpoint) for endpoint in GENERATIONS)


def _failures(router: Samples) -> float:
    codes = router.by_label("sluice_requests_total", "code")
    return sum(
        router.total("sluice_requests_total", endpoint=endpoint, code=code)
        for code in codes
        if code.startswith("5")
        for endpoint in GENERATIONS
    )


def _quantiles(name: str, before: Samples, now: Samples) -> tuple[float | None, float | None]:
    # The first look has nothing to compare with: it shows all since the router's start.
    earlier = {} if before is now else before.buckets(name)
    p50, p99 = (quantile(share, now.buckets(name), earlier) for share in (0.5, 0.99))
    return p50, p99


def _counts(values: Mapping[str, float]) -> dict[str, int]:
    return {name: int(value) for name, value in values.items()}


def _natural(worker_id: WorkerId) -> tuple[int, str]:
    """Sort decode-2 before decode-10."""
    return len(worker_id), worker_id
