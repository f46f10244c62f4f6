"""All KV blocks of one worker: one contiguous, page-aligned allocation that a NIC can write to."""

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from core.kv_layout import KVLayout
from engine.kv_rows import rows_of

SCRATCH_NBYTES = 4096
_WORD_NBYTES = 4
_DIGEST_NBYTES = 8
_CHUNK_NBYTES = 8 * 2**20


class KVPool:
    """``num_blocks`` blocks of ``layout``, cleared at the start.

    Cleared, because attention multiplies what it masks by zero, and NaN times zero is NaN.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        device: torch.device,
        staging_nbytes: int = 0,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        nbytes = num_blocks * layout.block_nbytes
        staging_start = _aligned(nbytes + SCRATCH_NBYTES)
        self.staging_range = range(staging_start, staging_start + staging_nbytes)
        """Offsets of room for KV that a read brings in another shape."""
        self.registered_nbytes = self.staging_range.stop
        """Of the allocation: behind the blocks there is room for reads whose bytes nobody wants,
        and the staging."""
        memory = _allocate(self.registered_nbytes, device, num_touched=staging_start)
        self.staging = memory[staging_start:]
        """[staging_nbytes] uint8."""
        self.blocks = memory[:nbytes].view(num_blocks, layout.block_nbytes)
        """[num_blocks, block_nbytes] uint8."""
        self._words = self.blocks.view(torch.int32)
        self._stream = _stream_after_now(device) if device.type == "cuda" else None
        self.key_rows, self.value_rows = rows_of(self.blocks, layout)
        """Per layer of a group, by its place there."""
        self.keys = tuple(rows.numbers for rows in self.key_rows)
        """Per layer as above: [num_blocks, block_size, heads, head_dim], without any scales."""
        self.values = tuple(rows.numbers for rows in self.value_rows)

    @property
    def address(self) -> int:
        """Of the first byte, in this process or on the device."""
        return self.blocks.data_ptr()

    @property
    def nbytes(self) -> int:
        """Of the whole pool."""
        return self.blocks.numel()

    def zero(self, block_ids: Sequence[int]) -> None:
        """Clear the named blocks."""
        self.fill(block_ids, 0)

    def fill(self, block_ids: Sequence[int], byte: int) -> None:
        """Set every byte of the named blocks to ``byte``."""
        if len(block_ids):
            self.blocks[torch.tensor(block_ids, device=self.blocks.device)] = byte

    def fill_words(
        self, block_ids: NDArray[np.integer[Any]], words: NDArray[np.integer[Any]]
    ) -> None:
        """Repeat ``words[i]`` over all of block ``block_ids[i]``, beside the steps on the device.

        No step in flight may touch the blocks.
        """
        with self._beside_steps():
            for ids, values in self._in_chunks(block_ids, words):
                self._words[ids] = values

    def find_other_word(
        self, block_ids: NDArray[np.integer[Any]], words: NDArray[np.integer[Any]]
    ) -> tuple[int, int] | None:
        """Return the first ``i`` whose block is not all ``words[i]``, and the offset in bytes.

        Sees every earlier ``fill_words``, and has ended on return: whatever is begun afterwards, a
        step or a read by a NIC, comes after both. No step in flight may touch the blocks.
        """
        with self._beside_steps():
            done = 0
            for ids, values in self._in_chunks(block_ids, words):
                differs = self._words[ids] != values
                if bool(differs.any()):
                    first = int(differs.flatten().to(torch.uint8).argmax())
                    index, word = divmod(first, differs.shape[1])
                    return done + index, word * _WORD_NBYTES
                done += len(ids)
        return None

    def _in_chunks(
        self, block_ids: NDArray[np.integer[Any]], words: NDArray[np.integer[Any]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield ids [n] and words [n, 1] on the pool's device, for blocks of some MiB together."""
        step = max(1, _CHUNK_NBYTES // self.layout.block_nbytes)
        for at in range(0, len(block_ids), step):
            ids = torch.from_numpy(block_ids[at : at + step].astype(np.int64))
            values = torch.from_numpy(words[at : at + step].astype(np.int32))
            device = self.blocks.device
            yield ids.to(device), values.unsqueeze(1).to(device)

    def _beside_steps(self) -> AbstractContextManager[object]:
        """Work on the pool's own stream: on the steps' it would wait for those in flight."""
        if self._stream is None:
            return nullcontext()
        return torch.cuda.stream(self._stream)

    def digests(self, block_ids: Sequence[int], *, offset: int, nbytes: int) -> tuple[bytes, ...]:
        """Return a digest of ``nbytes`` at ``offset`` of each block; its id is no part of it."""
        return tuple(
            digest_of(self.blocks[block_id, offset : offset + nbytes]) for block_id in block_ids
        )

    def bytes_of(self, block_id: int) -> bytes:
        """Return a copy of one block."""
        return self.blocks[block_id].cpu().numpy().tobytes()


def digest_of(block: torch.Tensor) -> bytes:
    """Return a digest of the bytes of ``block``, which is contiguous."""
    return hashlib.blake2b(block.cpu().numpy().data, digest_size=_DIGEST_NBYTES).digest()


def _stream_after_now(device: torch.device) -> torch.cuda.Stream:
    """Return a stream whose work comes after all that the device was given up to now."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _aligned(offset: int) -> int:
    return -(-offset // SCRATCH_NBYTES) * SCRATCH_NBYTES


def _allocate(nbytes: int, device: torch.device, *, num_touched: int) -> torch.Tensor:
    """Return ``nbytes`` bytes of zero; those behind ``num_touched`` come when used."""
    if device.type != "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    # Private: a child process that is forked must not share the pool's pages.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # Touched now: a page that is first touched by a read or a step makes a request wait for it.
    allocated = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
    allocated[:num_touched].zero_()
    return allocated
