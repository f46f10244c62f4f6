"""A worker asks its mover for the same things whether it has tiers or not."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from core.config import CacheConfig
from core.errors import ConfigError
from core.ids import BlockId, OperationId
from core.kv_layout import KVGroup, KVLayout
from core.tiers import CopyOut
from tests.transfer.tier_parts import Answers, Memory, slots_of
from transfer.tiers.mover import TierMemory
from transfer.tiers.opening import WorkerMover, WorkerTiers, open_mover

LAYOUT = KVLayout(
    groups=(KVGroup(layers=(0,)),), block_size=16, num_kv_heads=1, head_dim=8, dtype="float32"
)


@dataclass
class Decides(Answers):
    """The deciding side of a worker whose host memory has room for so many blocks."""

    num_host_slots: int = 5


def open_for(
    tiers: WorkerTiers | None, cache: CacheConfig, changed: asyncio.Event, memory: Memory
) -> tuple[WorkerMover, CollectorRegistry]:
    def make(num_slots: int) -> TierMemory:
        assert num_slots == 5
        assert tiers is not None
        return memory

    registry = CollectorRegistry()
    mover = open_mover(
        tiers,
        make,
        cache,
        layout=LAYOUT,
        model_fingerprint="model",
        metrics=(registry, "decode"),
        on_change=changed.set,
    )
    return mover, registry


async def test_without_tiers_every_call_does_nothing_and_no_memory_is_made() -> None:
    changed = asyncio.Event()
    mover, registry = open_for(None, CacheConfig(), changed, Memory(num_slots=0))
    await mover.check()
    mover.carry_out()
    await mover.close(timeout_s=60)
    assert list(registry.collect()) == []
    assert not changed.is_set()


async def test_with_tiers_what_was_decided_is_carried_out(tmp_path: Path) -> None:
    changed, memory, tiers = asyncio.Event(), Memory(), Decides()
    cache = CacheConfig(host_tier_gib=1, storage_url=tmp_path.as_uri())
    mover, registry = open_for(tiers, cache, changed, memory)
    await mover.check()
    assert tiers.epoch == ""

    tiers.actions.append(CopyOut(OperationId(-1), (BlockId(3),), slots_of(4)))
    mover.carry_out()
    async with asyncio.timeout(60):
        await changed.wait()

    assert OperationId(-1) in tiers.answers
    assert memory.slots[4] == memory.pool[3]
    assert registry.get_sample_value("sluice_kv_storage_left_alone", {"role": "decode"}) == 0
    await mover.close(timeout_s=60)


async def test_a_url_that_names_no_storage_stops_the_start() -> None:
    cache = CacheConfig(host_tier_gib=1, storage_url="file:///proc/no")
    with pytest.raises(ConfigError):
        open_for(Decides(), cache, asyncio.Event(), Memory())
