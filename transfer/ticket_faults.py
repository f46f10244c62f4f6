"""What may be wrong with a peer's ticket. Found here, it ends one request, not the worker."""

from collections.abc import Sequence

from core.messages import PieceId, Ticket
from transfer.positions import BlockSizes
from transfer.receiving import Receiving


def fault_of(ticket: Ticket, entry: Receiving) -> str | None:
    """Return what is wrong with a ticket that ``entry`` has not seen yet; None: nothing."""
    piece, shape = ticket.piece, entry.shape
    last_chunk = entry.last_chunk
    if piece in entry.pieces:
        return f"{piece} was offered before, in other blocks or generations"
    if not (
        0 <= piece.first_layer <= piece.last_layer < shape.num_layers
        and piece.chunk >= 0
        and (entry.wanted is None or piece.chunk < shape.max_chunks(entry.wanted))
    ):
        return f"{piece} does not exist in {shape}"
    if last_chunk is not None and (
        piece.chunk > last_chunk or ticket.last != (piece.chunk == last_chunk)
    ):
        return f"{piece} contradicts chunk {last_chunk} being the last"
    if ticket.last and any(known.chunk > piece.chunk for known in entry.pieces):
        return f"{piece} is called the last, after later ones"
    if any(
        len(run.block_ids) != len(run.generations)
        or len(run.digests) not in {0, len(run.block_ids)}
        or run.first_index < 0
        or not run.block_ids
        or not 0 <= run.group < len(shape.groups)
        for run in ticket.blocks
    ):
        return f"the blocks of {piece} are malformed"
    return _position_fault(ticket, entry) or _token_fault(ticket, entry)


def gap_in(entry: Receiving) -> str | None:
    """Return what the tickets of ``entry`` together leave out; None: nothing, or not all are here.

    Checked before anything may be delivered: a block that no ticket names would be read as KV, and
    so would a layer of a block.
    """
    if entry.wanted is None or not entry.is_announced:
        return None
    sizes = entry.shape.sizes
    needed = [sizes.required_there(group, entry.wanted) for group in range(len(sizes.groups))]
    for layer in _layers_of_change(entry):
        named = _positions(entry, like=PieceId(layer, layer, 0))
        for group, indices in enumerate(needed):
            missing = [index for index in indices if (group, index) not in named]
            if missing:
                return f"no ticket names blocks {missing[:4]} of group {group}"
    return None


def _layers_of_change(entry: Receiving) -> list[int]:
    """Return the layers, the first one included, that other pieces have than the one before."""
    firsts = {piece.first_layer for piece in entry.pieces}
    behind = {piece.last_layer + 1 for piece in entry.pieces}
    return sorted({0} | firsts | behind - {entry.shape.num_layers})


def _position_fault(ticket: Ticket, entry: Receiving) -> str | None:
    """Return whether a position is named twice, or was not asked for."""
    named = [
        (run.group, run.first_index + at)
        for run in ticket.blocks
        for at in range(len(run.block_ids))
    ]
    if len(set(named)) != len(named) or not _positions(entry, like=ticket.piece).isdisjoint(named):
        return f"{ticket.piece} names a position twice"
    if entry.wanted is not None:
        asked = entry.shape.sizes.indices_there(entry.wanted)
        if any(index not in asked for _, index in named):
            return f"{ticket.piece} names blocks outside of {asked}"
        if _names_what_no_window_needs(named, entry.shape.sizes, entry.wanted):
            return f"{ticket.piece} names blocks that no window needs"
    return None


def _names_what_no_window_needs(
    named: Sequence[tuple[int, int]], sizes: BlockSizes, wanted: range
) -> bool:
    """Whether one is behind the window of the prompt's end: no memory was promised for it."""
    windowed = {group for group, _ in named if sizes.groups[group].window is not None}
    needed = {(group, at) for group in windowed for at in sizes.required_there(group, wanted)}
    return any(place[0] in windowed and place not in needed for place in named)


def _token_fault(ticket: Ticket, entry: Receiving) -> str | None:
    """Return whether it covers other tokens than its blocks hold: those would be read as KV."""
    size = entry.shape.sizes.source
    if entry.wanted is None:
        return None
    if ticket.num_tokens > entry.wanted.stop or (
        ticket.last and ticket.num_tokens != entry.wanted.stop
    ):
        return f"{ticket.piece} covers {ticket.num_tokens} tokens of {entry.wanted.stop}"
    for run in ticket.blocks:
        end = (run.first_index + len(run.block_ids)) * size
        # The last block of a prompt may be full in part, any other is full.
        is_at_end = ticket.num_tokens == entry.wanted.stop
        if (end - size if is_at_end else end - 1) >= ticket.num_tokens:
            return f"{ticket.piece} covers {ticket.num_tokens} tokens, its blocks go to {end}"
    return None


def _positions(entry: Receiving, *, like: PieceId | None = None) -> set[tuple[int, int]]:
    """Return (group, index) of all that tickets name, or of the pieces that clash with ``like``.

    Pieces of other layers share positions.
    """
    return {
        (run.group, run.first_index + at)
        for piece_id, piece in entry.pieces.items()
        if like is None or _clash(piece_id, like)
        for run in piece.ticket.blocks
        for at in range(len(run.block_ids))
    }


def _clash(one: PieceId, other: PieceId) -> bool:
    return one.first_layer <= other.last_layer and other.first_layer <= one.last_layer
