"""Puts KV that came in its source's shape into the blocks of a pool: heads, block size, float8."""

from contextlib import nullcontext

import torch

from core.errors import InternalError
from core.kv_layout import KVLayout
from core.kv_unpack import Unpack
from engine.kv_pool import KVPool, digest_of
from engine.kv_quantisation import quantise
from engine.kv_rows import TORCH_DTYPES

_SLOTS = 2
"""Their dimension in a block: ``[layers, 2, slots, heads, row]``."""


class KVConverter:
    """Writes into one pool from the room behind it. Used by one thread."""

    def __init__(self, pool: KVPool) -> None:
        layout = pool.layout
        self._pool = pool
        self._rows = pool.blocks.view(
            pool.num_blocks,
            layout.layers_per_group,
            2,
            layout.block_size,
            layout.heads_per_group,
            layout.row_nbytes,
        )
        self._stream: torch.cuda.Stream | None = None
        if pool.blocks.is_cuda:
            self._stream = torch.cuda.Stream(pool.blocks.device)
            self._stream.wait_stream(torch.cuda.current_stream(pool.blocks.device))

    @property
    def staging(self) -> range:
        """Where a read may put what is to be unpacked: offsets from the pool's address."""
        return self._pool.staging_range

    def digests(self, work: Unpack) -> tuple[bytes, ...]:
        """Return a digest of each block of ``work`` as it was staged, as ``KVPool.digests``.

        Raises:
            InternalError: it is not in the staging.
        """
        return tuple(map(digest_of, self._staged(work).flatten(1)))

    @torch.inference_mode()
    def unpack(self, work: Unpack) -> None:
        """Write every run of ``work`` into the pool: done, and visible to later steps, on return.

        Each row depends on its own bytes alone, and is the one that a step would have written.
        Nothing else of the blocks changes. No step in flight may touch them.

        Raises:
            InternalError: it cannot be converted, or is not in the staging.
        """
        # A stream of its own: on that of the steps it would wait for those in flight.
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._unpack(work)
        if self._stream is not None:
            self._stream.synchronize()

    def _unpack(self, work: Unpack) -> None:
        heads = work.source_heads
        staged = self._staged(work)[..., heads.start : heads.stop, :]
        target = self._target(work)
        for block, runs in zip(staged, work.runs, strict=True):
            for run in runs:
                rows = block.narrow(_SLOTS, run.source_slot, run.num_tokens)
                kept = target[run.block_id].narrow(_SLOTS, run.slot, run.num_tokens)
                self._put(kept, rows, work.source)

    def _staged(self, work: Unpack) -> torch.Tensor:
        """Return [num_blocks, layers, 2, block_size, heads, row] uint8."""
        source, room = work.source, self._pool.staging_range
        shape = torch.Size(
            (
                work.num_blocks,
                len(work.layers),
                2,
                source.block_size,
                source.heads_per_group,
                source.row_nbytes,
            )
        )
        if work.offset not in room or work.offset + shape.numel() > room.stop:
            raise InternalError(f"{shape.numel()} bytes at {work.offset} are not within {room}")
        at = work.offset - room.start
        return self._pool.staging[at : at + shape.numel()].view(shape)

    def _target(self, work: Unpack) -> torch.Tensor:
        """Return the same dimensions of the whole pool."""
        layers, heads = work.layers, work.heads
        return self._rows[:, layers.start : layers.stop, ..., heads.start : heads.stop, :]

    def _put(self, kept: torch.Tensor, rows: torch.Tensor, source: KVLayout) -> None:
        """Make ``kept`` what ``rows`` [layers, 2, tokens, heads, row] are in the pool's dtype."""
        layout = self._pool.layout
        if source.dtype == layout.dtype:
            kept.copy_(rows)
            return
        if not layout.has_scales or source.has_scales:
            raise InternalError(f"KV in {source.dtype} does not become {layout.dtype}")
        numbers, scales = quantise(rows.view(TORCH_DTYPES[source.dtype]))
        kept[..., : layout.head_dim] = numbers.view(torch.uint8)
        kept[..., layout.head_dim :] = scales.unsqueeze(-1).view(torch.uint8)
