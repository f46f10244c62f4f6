"""What of a prompt can be ticketed: chunk by chunk, the last one cut by its layers."""

from collections.abc import Iterator
from dataclasses import dataclass

from blockmgr.block_manager import BlockManager
from blockmgr.window import needed_blocks
from core.ids import BlockId
from core.kv_layout import KVLayout
from core.messages import FirstToken, GroupBlocks
from prefill.cuts import Cut, CutPlan
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
    only the computation of its own later layers to hide behind, so it alone is cut
    (``prefill.cuts``): of a range of layers, adjacent blocks are not adjacent bytes, and need a
    descriptor each. Ranges of one chunk name the same blocks.
    """

    def __init__(self, blocks: BlockManager, layout: KVLayout, *, layer_ranges: int) -> None:
        self._blocks = blocks
        self._layout = layout
        self._plan = CutPlan.of(layout, layer_ranges)
        self._whole = self._plan.cuts[0].joined(self._plan.cuts[1:])

    @property
    def marks(self) -> tuple[int, ...]:
        """Layers of the model after which a last chunk can be offered in part."""
        return self._plan.marks

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
        offer = self._offer(prompt, self._whole, blocks, end, is_last=False)
        prompt.num_chunks_offered += 1
        return offer

    def layers_done(self, prompt: Prompt, mark: int) -> SettledChunk | None:
        """Offer what the step of the last chunk has completed up to layer ``mark``.

        All earlier chunks have settled.
        """
        num_complete = self._plan.marks.index(mark) + 1
        if num_complete <= prompt.num_cuts_offered:
            return None
        cut = self._next_cut(prompt, num_complete)
        blocks = self._last_blocks(prompt, cut)
        if not blocks:
            return None  # all behind windows: named with whatever comes next
        prompt.num_cuts_offered = num_complete
        is_last = self._plan.is_by_layers
        offer = self._offer(prompt, cut, blocks, prompt.num_tokens, is_last=is_last)
        prompt.num_chunks_offered += not is_last
        return offer

    def finished(self, prompt: Prompt, first_token: FirstToken) -> SettledChunk:
        """Offer all the rest of a prompt that has settled as a whole."""
        cut = self._next_cut(prompt, len(self._plan.cuts))
        blocks = self._last_blocks(prompt, cut)
        return self._offer(
            prompt, cut, blocks, prompt.num_tokens, is_last=True, first_token=first_token
        )

    def _next_cut(self, prompt: Prompt, num_complete: int) -> Cut:
        first, *others = self._plan.cuts[prompt.num_cuts_offered : num_complete]
        return first.joined(others)

    def _offer(
        self,
        prompt: Prompt,
        cut: Cut,
        blocks: tuple[GroupBlocks, ...],
        num_tokens: int,
        *,
        is_last: bool,
        first_token: FirstToken | None = None,
    ) -> SettledChunk:
        return SettledChunk(
            prompt=prompt,
            chunk=prompt.num_chunks_offered,
            first_layer=cut.first_layer,
            last_layer=cut.last_layer,
            blocks=blocks,
            num_tokens=num_tokens,
            is_last=is_last,
            first_token=first_token,
        )

    def _last_blocks(self, prompt: Prompt, cut: Cut) -> tuple[GroupBlocks, ...]:
        """Name the blocks of the last chunk, once: all that is cut out of it must agree in them."""
        if prompt.last_blocks is None:
            prompt.last_blocks = self._name_blocks(prompt, prompt.num_tokens)
        return tuple(named for named in prompt.last_blocks if named.group in cut.groups)

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
