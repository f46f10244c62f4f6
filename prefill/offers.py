"""What of a prompt can be ticketed: named once per chunk, in layer ranges where it is the last."""

from collections.abc import Iterator
from dataclasses import dataclass

from blockmgr.block_manager import BlockManager
from blockmgr.window import needed_blocks
from core.ids import BlockId
from core.kv_layout import KVLayout
from core.messages import FirstToken, GroupBlocks
from prefill.layer_ranges import layers_complete_at
from prefill.prompt import Prompt


@dataclass(frozen=True, slots=True)
class SettledChunk:
    """KV that is complete and not ticketed yet: the content of the next ticket."""

    prompt: Prompt
    chunk: int
    first_layer: int
    last_layer: int
    """Inclusive; of each group."""
    blocks: tuple[GroupBlocks, ...]
    num_tokens: int
    is_last: bool
    """No chunk after this one."""
    first_token: FirstToken | None
    """Set with the last offer of a prompt, which is LEASED from now on."""


class Offers:
    """Cuts what has been computed into offers, each of which names KV that is complete.

    The transfer of a chunk hides behind the next chunk's computation. That of the last chunk has
    only the computation of its own later layers to hide behind, so it alone comes in layer ranges:
    of a range, adjacent blocks are not adjacent bytes, and need a descriptor each. All ranges name
    the same blocks.
    """

    def __init__(self, blocks: BlockManager, layout: KVLayout, *, layer_ranges: int) -> None:
        self._blocks = blocks
        self._layout = layout
        self._complete_at = layers_complete_at(layout, layer_ranges)

    @property
    def marks(self) -> tuple[int, ...]:
        """Layers of the model after which a last chunk can be offered in part."""
        return tuple(self._complete_at)

    def settled(self, prompt: Prompt) -> SettledChunk | None:
        """Offer the full blocks settled since the last offer, while more chunks are to come."""
        block_size = self._layout.block_size
        end = prompt.num_settled // block_size * block_size
        if end <= prompt.num_offered:
            return None
        blocks = self._name_blocks(prompt, end)
        prompt.num_offered = end
        if not blocks:
            return None  # all behind the windows that the whole prompt leaves open
        prompt.num_chunks_offered += 1
        return SettledChunk(
            prompt=prompt,
            chunk=prompt.num_chunks_offered - 1,
            first_layer=0,
            last_layer=self._layout.layers_per_group - 1,
            blocks=blocks,
            num_tokens=end,
            is_last=False,
            first_token=None,
        )

    def layers_done(self, prompt: Prompt, mark: int) -> SettledChunk | None:
        """Offer what the step of the last chunk has completed up to layer ``mark``.

        All earlier chunks have settled.
        """
        last_layer = self._complete_at[mark]
        blocks = self._last_blocks(prompt)
        if last_layer < prompt.num_layers_offered or not blocks:
            return None
        return self._offer_last(prompt, blocks, last_layer, None)

    def finished(self, prompt: Prompt, first_token: FirstToken) -> SettledChunk:
        """Offer all the rest of a prompt that has settled as a whole."""
        last_layer = self._layout.layers_per_group - 1
        return self._offer_last(prompt, self._last_blocks(prompt), last_layer, first_token)

    def _offer_last(
        self,
        prompt: Prompt,
        blocks: tuple[GroupBlocks, ...],
        last_layer: int,
        first_token: FirstToken | None,
    ) -> SettledChunk:
        first_layer, prompt.num_layers_offered = prompt.num_layers_offered, last_layer + 1
        return SettledChunk(
            prompt=prompt,
            chunk=prompt.num_chunks_offered,
            first_layer=first_layer,
            last_layer=last_layer,
            blocks=blocks,
            num_tokens=prompt.num_tokens,
            is_last=True,
            first_token=first_token,
        )

    def _last_blocks(self, prompt: Prompt) -> tuple[GroupBlocks, ...]:
        """Name the blocks of the last chunk, once: its ranges must agree in them."""
        if prompt.last_blocks is None:
            prompt.last_blocks = self._name_blocks(prompt, prompt.num_tokens)
        return prompt.last_blocks

    def _name_blocks(self, prompt: Prompt, end: int) -> tuple[GroupBlocks, ...]:
        groups = range(len(self._layout.groups))
        return tuple(named for group in groups for named in self._of_group(prompt, group, end))

    def _of_group(self, prompt: Prompt, group: int, end: int) -> Iterator[GroupBlocks]:
        """Blocks of ``group`` from the last offer up to ``end`` that decode will ever read.

        Behind the window that the whole prompt leaves open, nothing is advertised.
        """
        block_size = self._layout.block_size
        start = prompt.num_offered // block_size
        stop = self._layout.num_blocks_for(end)
        table = self._blocks.block_tables(prompt.owner)[group]
        for run in needed_blocks(self._layout.groups[group], block_size, prompt.num_tokens):
            first, last = max(run.start, start), min(run.stop, stop)
            if first < last:
                block_ids = [BlockId(block_id) for block_id in table[first:last].tolist()]
                yield GroupBlocks(
                    group=group,
                    first_index=first,
                    block_ids=tuple(block_ids),
                    generations=tuple(map(self._blocks.generation, block_ids)),
                )
