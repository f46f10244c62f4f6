"""The sequences of one HTTP request, as one stream of deltas."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

from core.errors import RequestError
from router.metrics import RouterMetrics
from router.sequence import Delta, Sequence

EndCause = Literal["client", "shutdown", "failed"]


@dataclass(frozen=True, slots=True)
class IndexedDelta:
    """A delta and the sequence that it belongs to."""

    index: int
    delta: Delta


class Generation:
    """Collects what the sequences of one request give, in order of arrival.

    The dispatcher puts deltas and ends in, synchronously; one reader takes them out with
    ``next_deltas``. All that arrived since the reader last looked comes in one list, so a slow
    reader costs one write, not one for each token.
    """

    def __init__(self, sequences: Items[Sequence], *, metrics: RouterMetrics, model: str) -> None:
        self.sequences = tuple(sequences)
        self.end_cause: EndCause = "client"
        """Why sequences still running are cancelled."""
        self._pending: deque[IndexedDelta] = deque()
        self._num_running = len(self.sequences)
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        self._metrics = metrics
        self._model = model
        self._timers = [_TokenTimer(metrics, model) for _ in self.sequences]

    def put(self, index: int, delta: Delta) -> None:
        """Add a delta of the sequence at ``index``."""
        if delta.num_tokens:
            self._timers[index].saw_tokens(delta.num_tokens)
        self._pending.append(IndexedDelta(index, delta))
        self._news.set()

    def end(self, index: int) -> None:
        """Record that the sequence at ``index`` has finished."""
        self._timers[index].end(self.sequences[index])
        self._num_running -= 1
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """Record that a sequence failed, and with it the request; the first error counts."""
        if self.end_cause == "client":
            self.end_cause = "failed"
        if self._error is None and not isinstance(error, RequestError):
            self._metrics.count_in_time(self._model, ttft=False, itl=False)
        self._error = self._error or error
        self._news.set()

    async def next_deltas(self) -> list[IndexedDelta]:
        """Return what has arrived, at least one delta; an empty list after the last.

        Raises:
            SluiceError: a sequence failed. Deltas before the failure were returned first.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._num_running:
                return []
            self._news.clear()
            await self._news.wait()
        deltas = list(self._pending)
        self._pending.clear()
        return deltas


class _TokenTimer:
    """Observes the latencies of one sequence's tokens."""

    def __init__(self, metrics: RouterMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._start_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._num_tokens = 0
        self._gaps = metrics.inter_token_latency.labels(model=model)

    def saw_tokens(self, num_tokens: int) -> None:
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            self._metrics.time_to_first_token.labels(model=self._model).observe(
                now_s - self._start_s
            )
        else:
            self._gaps.observe(now_s - self._last_s)
        self._last_s = now_s
        self._num_tokens += num_tokens

    def end(self, sequence: Sequence) -> None:
        mean_s = 0.0
        if self._first_s is not None and self._num_tokens > 1:
            mean_s = (self._last_s - self._first_s) / (self._num_tokens - 1)
            self._metrics.time_per_output_token.labels(model=self._model).observe(mean_s)
        if self._first_s is not None:
            goals = self._metrics.goals
            self._metrics.count_in_time(
                self._model,
                ttft=self._first_s - self._start_s <= goals.ttft_s,
                itl=mean_s <= goals.itl_s,
            )
        self._metrics.output_tokens.labels(model=self._model).observe(len(sequence.token_ids))
        if sequence.stats is not None:
            self._metrics.cached_tokens.labels(model=self._model).observe(
                sequence.stats.num_cached_tokens
            )
