"""A decode scheduler over a small pool; the test is the device."""

from blockmgr.block_manager import BlockManager
from blockmgr.states import BlockState
from core.config import SchedulerConfig
from core.ids import Attempt, Owner, RequestId
from core.kv_layout import KVGroup, KVLayout
from core.sampling import SamplingParams
from decode.scheduler import DecodeScheduler
from decode.sequence import Progress, Sequence
from engine.batch import SampledToken, StepBatch, StepOutput

STOP = 99
LAYOUT = KVLayout(
    groups=(KVGroup(layers=(0,)),), block_size=16, num_kv_heads=1, head_dim=4, dtype="float32"
)


class Bench:
    """A scheduler over a small pool, and the device's side of its steps."""

    def __init__(
        self,
        num_blocks: int,
        *,
        prefix_caching: bool = False,
        layout: KVLayout = LAYOUT,
        **config: int,
    ) -> None:
        self.blocks = BlockManager(layout, num_blocks, fences=True, prefix_caching=prefix_caching)
        self.scheduler = DecodeScheduler(
            self.blocks, layout, SchedulerConfig(**config), fingerprint="test"
        )

    def add(
        self,
        name: str,
        num_tokens: int,
        *,
        remote: bool = False,
        max_tokens: int = 100,
        first: int = 0,
    ) -> Sequence:
        sequence = Sequence(
            owner=self.owner(name),
            prompt_token_ids=tuple(range(first, first + num_tokens)),
            sampling=SamplingParams(seed=1, max_tokens=max_tokens, stop_token_ids=(STOP,)),
        )
        self.scheduler.add(sequence, remote=remote)
        return sequence

    def step(self) -> StepBatch:
        batch = self.scheduler.schedule()
        assert batch is not None
        return batch

    def complete(self, batch: StepBatch, token_id: int = 7) -> list[Progress]:
        tokens = tuple(SampledToken(s.slot, token_id) for s in batch.sequences if s.sample)
        return self.scheduler.complete(StepOutput(batch.step, tokens, 0.0))

    def owner(self, name: str) -> Owner:
        return RequestId(name), Attempt(1)

    @property
    def num_free(self) -> int:
        return self.blocks.counts()[BlockState.FREE]
