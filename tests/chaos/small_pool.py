"""A pool of small blocks in plain memory, and bytes that only one position of one request has."""

import numpy as np
from numpy.typing import NDArray

from core.config import SluiceConfig
from core.kv_layout import KVGroup, KVLayout
from core.messages import Compatibility

LAYOUT = KVLayout(
    (KVGroup(layers=(0, 1)),), block_size=16, num_kv_heads=1, head_dim=8, dtype="float32"
)
COMPATIBILITY = Compatibility("model", "tokenizer", LAYOUT, 1, model_dtype=LAYOUT.dtype)
CONFIG = SluiceConfig.parse(
    {
        "cache": {"poison": True, "prefix_caching": False},
        "scheduler": {"max_num_seqs": 256},
        "transfer": {"lease_s": 4.0, "renew_interval_s": 1.0, "read_timeout_s": 2.0},
    },
    source="soak",
)
SCRATCH_NBYTES = 4096
_WORDS = LAYOUT.block_nbytes // 4
_STRIDE = np.arange(_WORDS, dtype=np.uint32) * np.uint32(2654435761)


class SmallPool:
    """``PoisonableMemory``: a row per block, and behind the rows some bytes of none."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        nbytes = num_blocks * LAYOUT.block_nbytes
        self._memory = np.zeros(nbytes + SCRATCH_NBYTES, dtype=np.uint8)
        self.rows: NDArray[np.uint32] = self._memory[:nbytes].view(np.uint32).reshape(-1, _WORDS)
        self.address, self.nbytes, self.scratch_offset = (
            self._memory.ctypes.data,
            self._memory.nbytes,
            nbytes,
        )

    def fill_words(self, block_ids: NDArray[np.int64], words: NDArray[np.int32]) -> None:
        self.rows[block_ids] = words.view(np.uint32)[:, None]

    def find_other_word(
        self, block_ids: NDArray[np.int64], words: NDArray[np.int32]
    ) -> tuple[int, int] | None:
        wrong = np.argwhere(self.rows[block_ids] != words.view(np.uint32)[:, None])
        return (int(wrong[0, 0]), int(wrong[0, 1]) * 4) if len(wrong) else None


def content(number: int, attempt: int, num_blocks: int) -> NDArray[np.uint32]:
    """Return what the blocks of an attempt of request ``number`` hold: no two rows are alike."""
    keys = np.arange(num_blocks, dtype=np.uint64) + np.uint64((number * 8 + attempt) * 4096)
    keys = (keys * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    return keys.astype(np.uint32)[:, None] ^ _STRIDE
