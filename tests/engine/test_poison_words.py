"""A pattern that covers less than the whole block, or reads as NaN, hides what it should show."""

import numpy as np
import pytest
import torch

from core.kv_layout import KVLayout, LayerSpec, group_layers
from engine.kv_pool import KVPool
from engine.kv_rows import TORCH_DTYPES

NUM_BLOCKS = 40
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


def layout_of(*, head_dim: int = 64, dtype: str = "bfloat16") -> KVLayout:
    layers = [LayerSpec(num_kv_heads=2, head_dim=head_dim, window=None)] * 4
    return group_layers(layers, block_size=16, dtype=dtype)  # type: ignore[arg-type]


def settle(device: str) -> None:
    """Let all streams end: the tests write and read on another one than the pool's own."""
    if device == "cuda":
        torch.cuda.synchronize()


def ids(*block_ids: int) -> np.ndarray:
    return np.array(block_ids, dtype=np.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [1, 64, 4096])
def test_a_fill_covers_its_blocks_to_the_last_byte_and_no_other(device: str, head_dim: int) -> None:
    pool = KVPool(layout_of(head_dim=head_dim), 5, device=torch.device(device))
    words = ids(0x21222324, 0x31323334, 0x2A2B2C2D)
    pool.fill_words(ids(3, 0, 4), words)
    settle(device)
    size = pool.layout.block_nbytes
    for block_id, word in ((3, words[0]), (0, words[1]), (4, words[2])):
        assert pool.bytes_of(block_id) == word.tobytes() * (size // 4)
    assert {*pool.bytes_of(1), *pool.bytes_of(2)} == {0}
    assert pool.find_other_word(ids(3, 0, 4), words) is None


@pytest.mark.parametrize("device", DEVICES)
def test_one_changed_byte_is_found_whichever_block_and_offset(device: str) -> None:
    pool = KVPool(layout_of(head_dim=1024), NUM_BLOCKS, device=torch.device(device))
    block_ids = np.arange(NUM_BLOCKS, dtype=np.int32)[::-1].copy()
    words = (np.arange(NUM_BLOCKS) + 0x20202020).astype(np.int32)
    pool.fill_words(block_ids, words)
    size = pool.layout.block_nbytes
    for index, offset in ((0, 0), (7, 1), (NUM_BLOCKS - 1, size - 1)):
        block_id = int(block_ids[index])
        settle(device)
        pool.blocks[block_id, offset] ^= 1
        settle(device)
        assert pool.find_other_word(block_ids, words) == (index, offset // 4 * 4)
        pool.blocks[block_id, offset] ^= 1
        settle(device)
    assert pool.find_other_word(block_ids, words) is None
    assert pool.find_other_word(ids(), ids()) is None


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_i08_the_pattern_reads_as_small_finite_numbers(dtype: str) -> None:
    pool = KVPool(layout_of(dtype=dtype), NUM_BLOCKS, device=torch.device("cpu"))
    words = np.random.default_rng(1).integers(0, 0x20202020, NUM_BLOCKS, dtype=np.int32)
    pool.fill_words(np.arange(NUM_BLOCKS, dtype=np.int32), words & 0x1F1F1F1F | 0x20202020)
    assert (pool.keys[0].float().abs() < 2).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_i08_verifying_does_not_wait_for_steps_and_what_follows_sees_it() -> None:
    pool = KVPool(layout_of(), NUM_BLOCKS, device=torch.device("cuda"))
    all_ids, words = np.arange(NUM_BLOCKS, dtype=np.int32), ids(*[0x25252525] * NUM_BLOCKS)
    pool.fill_words(all_ids, words)
    pool.find_other_word(all_ids, words)
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # a step in flight, for about a second
    busy.record()

    pool.fill_words(all_ids, words + 1)
    assert pool.find_other_word(all_ids, words + 1) is None

    assert not busy.query(), "it waited for the step"
    busy.synchronize()
