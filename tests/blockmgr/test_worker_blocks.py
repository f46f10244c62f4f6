"""What a worker asks its block manager for: a fence that is off in workers alone is a race."""

import pytest

from blockmgr.fences import KVWriters
from blockmgr.free_queue import BlockIds
from blockmgr.poison import Words
from blockmgr.states import BlockState
from blockmgr.worker_blocks import WorkerBlocks
from core.config import SluiceConfig
from core.ids import Incarnation
from tests.blockmgr.words import admit_new, layout_of


class NoMemory:
    """A pool whose bytes nobody looks at."""

    num_blocks = 8

    def fill_words(self, block_ids: BlockIds, words: Words) -> None:
        """Write nothing."""

    def find_other_word(self, block_ids: BlockIds, words: Words) -> tuple[int, int] | None:
        """Find nothing."""


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("writers", "cache", "is_fenced"),
    [
        (KVWriters.CONSUMER, {}, True),
        (KVWriters.BOTH, {}, True),
        (KVWriters.NONE, {}, False),
        (KVWriters.PRODUCER, {}, False),
        (KVWriters.NONE, {"host_tier_gib": 0.001}, True),
        (KVWriters.PRODUCER, {"host_tier_gib": 0.001}, True),
        (KVWriters.NONE, {"poison": True}, True),
    ],
)
def test_a17_a_worker_fences_what_is_released_in_mid_step_where_others_write(
    writers: KVWriters, cache: dict[str, object], *, is_fenced: bool, depth: int
) -> None:
    config = SluiceConfig.parse(
        {"cache": cache, "scheduler": {"overlap_depth": depth}}, source="test"
    )
    blocks = WorkerBlocks.make(
        layout_of(),
        NoMemory(),
        config,
        incarnation=Incarnation("1f"),
        writers=writers,
        clock=lambda: 0.0,
    ).manager
    owner = admit_new(blocks, "R", 33)
    step = blocks.dispatch_step([owner])

    blocks.release(owner)

    expected = 3 if is_fenced else 0
    assert blocks.counts()[BlockState.FENCED] == expected
    blocks.complete_step(step)
    assert blocks.num_allocatable == 8
