"""What has arrived, against what was sent: digests of blocks, by absolute position."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core.ids import BlockId
from core.kv_layout import KVLayout
from core.messages import GroupBlocks, Ticket
from transfer.extents import LayerSpan

DigestsOf = Callable[[list[BlockId], LayerSpan], Sequence[bytes]]
"""Digests of one span of local blocks, as they are now. A block's id is no part of its digest."""


@dataclass(frozen=True, slots=True)
class Digests:
    """What local blocks must hold."""

    span: LayerSpan
    by_block: Mapping[BlockId, bytes]

    def match(self, digests_of: DigestsOf) -> bool:
        """Whether they do."""
        return list(digests_of(list(self.by_block), self.span)) == list(self.by_block.values())


def expected_digests(
    ticket: Ticket, targets: Sequence[GroupBlocks], layout: KVLayout
) -> Digests | None:
    """Return what ``targets`` must hold once the ticket's read has landed.

    None where the source has computed no digests.
    """
    digest_at = {
        (run.group, run.first_index + at): digest
        for run in ticket.blocks
        for at, digest in enumerate(run.digests)
    }
    if not digest_at:
        return None
    by_block = {
        block_id: digest_at[run.group, run.first_index + at]
        for run in targets
        for at, block_id in enumerate(run.block_ids)
        if (run.group, run.first_index + at) in digest_at
    }
    return Digests(LayerSpan.of_piece(ticket.piece, layout), by_block)
