"""Finds a worker for a sequence, and waits for one where there is none."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from core.config import SluiceConfig
from core.errors import OverloadedError
from core.ids import WorkerId
from router.fleet import Fleet
from router.links import DecodeLink
from router.metrics import RouterMetrics
from router.policy import OwnLoad, Route, choose_route
from router.request_phase import Phase
from router.running import RunningSequence


@dataclass(frozen=True, slots=True)
class Placer:
    """Owned by one event loop."""

    config: SluiceConfig
    fleet: Fleet
    metrics: RouterMetrics
    on_workers: Callable[[], Iterable[RunningSequence]]
    """Gives what this router has on workers: a load that they may not have reported yet."""

    async def place(self, running: RunningSequence) -> tuple[DecodeLink, Route]:
        """Return where the next attempt goes, as soon as there is a worker for it.

        Raises:
            OverloadedError: there was none for ``router.admission_wait_s``.
        """
        wait_s = self.config.router.admission_wait_s
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    with self.metrics.overhead("choose"):
                        route = self._choose(running)
                    link = None if route is None else self.fleet.link(route.decode)
                    if route is not None and link is not None:
                        return link, route
                    await self.fleet.changed()
        except TimeoutError as error:
            self.metrics.rejections.labels(reason="no_worker").inc()
            raise OverloadedError(
                f"no decode worker became ready in {wait_s} s; try again later"
            ) from error

    def _choose(self, running: RunningSequence) -> Route | None:
        sequence = running.sequence
        return choose_route(
            len(sequence.spec.prompt_token_ids) + len(sequence.token_ids),
            decode=[w for w in self.fleet.registry.usable("decode") if self.fleet.link(w)],
            prefill=self.fleet.registry.usable("prefill"),
            own=self._own_load(),
            local_prefill_max_tokens=self.config.router.local_prefill_max_tokens,
            block_size=self.config.for_role("decode").cache.block_size,
            avoid=running.life.avoid,
        )

    def _own_load(self) -> OwnLoad:
        sequences: Counter[WorkerId] = Counter()
        prefill_tokens: Counter[WorkerId] = Counter()
        for running in self.on_workers():
            route = running.life.route
            assert route is not None, "it is on a worker"
            sequences[route.decode.worker_id] += 1
            if route.prefill is not None and running.life.phase is Phase.PREFILL:
                num_tokens = len(running.sequence.spec.prompt_token_ids)
                prefill_tokens[route.prefill.worker_id] += num_tokens
        return OwnLoad(sequences, prefill_tokens)
