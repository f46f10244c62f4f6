"""A prefill scheduler over a small pool; the test is the device."""

from blockmgr.block_manager import BlockManager
from core.config import SchedulerConfig
from core.ids import Attempt, Owner, RequestId
from core.kv_layout import KVGroup, KVLayout
from core.messages import Prefill
from core.sampling import SamplingParams
from engine.batch import SampledToken, StepBatch, StepOutput
from prefill.offers import SettledChunk
from prefill.scheduler import PrefillScheduler


class Bench:
    """A scheduler over a small pool; the test is the device."""

    def __init__(
        self,
        num_blocks: int,
        *,
        windows: tuple[int | None, ...] = (None,),
        num_sinks: int = 0,
        num_layers: int = 1,
        layer_ranges: int = 1,
    ) -> None:
        """Make a pool with a group per window, which take the model's layers in turn."""
        groups = tuple(
            KVGroup(
                layers=tuple(range(at, num_layers * len(windows), len(windows))),
                window=window,
                num_sinks=num_sinks if window else 0,
            )
            for at, window in enumerate(windows)
        )
        self.layout = KVLayout(
            groups=groups, block_size=16, num_kv_heads=1, head_dim=4, dtype="float32"
        )
        self.blocks = BlockManager(self.layout, num_blocks, fences=True, prefix_caching=True)
        self.scheduler = PrefillScheduler(
            self.blocks,
            self.layout,
            SchedulerConfig(max_batch_tokens=32),
            fingerprint="test",
            layer_ranges=layer_ranges,
        )

    def add(
        self,
        name: str,
        num_tokens: int,
        *,
        first_token: int = 0,
        salt: int = 0,
        attempt: int = 1,
    ) -> Owner:
        owner = (RequestId(name), Attempt(attempt))
        self.scheduler.add(
            Prefill(
                request_id=owner[0],
                attempt=owner[1],
                prompt_token_ids=tuple(salt + token for token in range(num_tokens)),
                sampling=SamplingParams(seed=1, max_tokens=5),
                first_token=first_token,
            )
        )
        return owner

    def complete(self, batch: StepBatch) -> list[SettledChunk]:
        tokens = tuple(SampledToken(s.slot, 7) for s in batch.sequences if s.sample)
        return self.scheduler.complete(StepOutput(batch.step, tokens, 0.0))

    def run(self) -> list[SettledChunk]:
        offers: list[SettledChunk] = []
        while (batch := self.scheduler.schedule()) is not None:
            offers += [*self.reach_marks(batch), *self.complete(batch)]
        return offers

    def reach_marks(self, batch: StepBatch) -> list[SettledChunk]:
        return [
            offer
            for mark in batch.layer_marks
            for offer in self.scheduler.layers_done(batch.step, mark)
        ]
