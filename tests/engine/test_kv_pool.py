"""Guards the pool: peers read it by address, so its layout is a promise to other machines."""

import mmap

import torch

from core.kv_layout import LayerSpec, group_layers
from engine.kv_pool import KVPool

LAYOUT = group_layers(
    [LayerSpec(num_kv_heads=2, head_dim=4, window=window) for window in (None, 8, None, 8)],
    block_size=4,
    dtype="bfloat16",
)


def make_pool() -> KVPool:
    return KVPool(LAYOUT, 5, device=torch.device("cpu"))


def test_pool_is_one_cleared_page_aligned_allocation() -> None:
    pool = make_pool()

    assert pool.address % mmap.PAGESIZE == 0
    assert pool.nbytes == 5 * LAYOUT.block_nbytes
    assert not pool.blocks.any()


def test_views_place_each_layer_where_the_layout_says() -> None:
    """[layers of the group, 2, block_size, kv_heads, head_dim], block after block."""
    pool = make_pool()
    pool.keys[1][3, 2, 1, 3] = 1.0
    pool.values[0][4, 0, 0, 0] = 2.0

    words = pool.blocks.view(torch.bfloat16).view(5, 2, 2, 4, 2, 4)

    assert words[3, 1, 0, 2, 1, 3] == 1.0
    assert words[4, 0, 1, 0, 0, 0] == 2.0
    assert words.count_nonzero() == 2


def test_fill_and_zero_touch_the_named_blocks_only() -> None:
    pool = make_pool()

    pool.fill([1, 3], 0xAB)
    pool.zero([3])

    contents = [set(pool.bytes_of(block)) for block in range(5)]
    assert contents == [{0}, {0xAB}, {0}, {0}, {0}]
    pool.zero([])
    assert set(pool.bytes_of(1)) == {0xAB}


def test_i07_a_digest_is_of_the_bytes_and_not_of_the_place() -> None:
    pool = make_pool()
    pool.fill([1, 4], 0xAB)
    half = LAYOUT.block_nbytes // 2

    (first, second, other) = pool.digests([1, 4, 2], offset=0, nbytes=LAYOUT.block_nbytes)
    assert first == second != other

    pool.blocks[4, half] ^= 1
    (before, after) = (pool.digests([at], offset=0, nbytes=half) for at in (1, 4))
    assert before == after
    assert pool.digests([1], offset=half, nbytes=half) != pool.digests(
        [4], offset=half, nbytes=half
    )
