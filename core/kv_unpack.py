"""KV that arrived in its source's shape, and where it belongs in a pool of another shape."""

from dataclasses import dataclass

from core.ids import BlockId
from core.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Adjacent tokens of a source block, and the slots of a local block that they belong to."""

    source_slot: int
    block_id: BlockId
    slot: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Unpack:
    """Staged blocks: ``[num_blocks, layers, 2, block_size, heads, row]`` of ``source``, contiguous.

    Heads count from the first of a layer on that side.
    """

    source: KVLayout
    """Of one rank there."""
    offset: int
    """Of the first byte, from the start of the registered memory."""
    layers: range
    """Of every block's group, in the group's own numbering: those that were staged."""
    source_heads: range
    heads: range
    runs: tuple[tuple[SlotRun, ...], ...]
    """Of each staged block, in order."""
    digests: tuple[bytes | None, ...]
    """Of each staged block as the source has it; None: it has not told."""

    @property
    def num_blocks(self) -> int:
        """Blocks that were staged."""
        return len(self.runs)
