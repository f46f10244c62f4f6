"""A block that comes back from host memory must be, byte for byte, the one that went there."""

import pytest
import torch

from core.ids import BlockId
from core.kv_layout import LayerSpec, group_layers
from core.tiers import HostSlot
from engine.host_arena import HostArena
from engine.kv_pool import KVPool

LAYOUT = group_layers([LayerSpec(num_kv_heads=2, head_dim=4)], block_size=4, dtype="bfloat16")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(each) for each in ids]


def slots(*ids: int) -> list[HostSlot]:
    return [HostSlot(each) for each in ids]


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_come_back_as_they_went_and_no_other_byte_changes(device: str) -> None:
    pool = KVPool(LAYOUT, 8, device=torch.device(device))
    pool.blocks.copy_(torch.randint(0, 256, pool.blocks.shape, dtype=torch.uint8))
    arena = HostArena(pool, 5)
    before = pool.blocks.clone()

    # Given blocks in runs and out of order in host memory
    arena.store(blocks(1, 2, 7, 4), slots(3, 4, 0, 1))
    assert bytes(arena.view(HostSlot(0))) == pool.bytes_of(7)
    assert bytes(arena.view(HostSlot(4))) == pool.bytes_of(2)
    pool.blocks.zero_()

    # When they are loaded elsewhere
    arena.load(slots(0, 1, 3), blocks(5, 6, 0))

    # Then exactly these blocks have the bytes
    assert torch.equal(pool.blocks[[5, 6, 0]], before[[7, 4, 1]])
    assert not pool.blocks[[1, 2, 3, 4, 7]].any()


def test_a_view_is_the_slot_itself_so_that_storage_can_fill_it() -> None:
    pool = KVPool(LAYOUT, 2, device=torch.device("cpu"))
    arena = HostArena(pool, 2)

    arena.view(HostSlot(1))[:] = bytes(range(64)) * (LAYOUT.block_nbytes // 64)
    arena.load(slots(1), blocks(0))

    assert pool.bytes_of(0) == bytes(range(64)) * (LAYOUT.block_nbytes // 64)
