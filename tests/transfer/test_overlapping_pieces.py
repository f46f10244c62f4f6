"""Pieces that share layers, but not positions, are counted by what each of them names.

A chunk's layers are all here as soon as *some* pieces of it have each layer. If that were all, a
source whose pieces overlap could leave layers of a block out, which would be read as KV that nobody
wrote; or have a request delivered while another piece of it is still being read into its blocks.
"""

from collections.abc import Sequence

import msgspec
import pytest

from core.ids import OperationId, Owner
from core.kv_layout import KVGroup, KVLayout
from core.messages import GroupBlocks, PieceId, Ticket
from tests.transfer.conftest import MakeDecode
from tests.transfer.two_sides import BLOCK_SIZE, DecodeSide, PrefillSide, layout, owner

R = owner("r")
NUM_BLOCKS = 4
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE
LAST_LAYER = 1


def ask(decode: DecodeSide, source: PrefillSide, who: Owner = R) -> None:
    """Ask for all of ``who``, so that its tickets are held to that."""
    decode.pair(source)
    decode.blocks.admit(who, tokens=None, num_cached_tokens=0, num_tokens=0)
    wanted = range(NUM_TOKENS)
    decode.carry_out(decode.reader.requested(who, source.incarnation, decode.now, wanted=wanted))


def part(
    whole: Ticket, piece: PieceId, indices: range, *, last: bool, groups: Sequence[int] = (0,)
) -> Ticket:
    """Return the ticket for some layers of some positions of ``whole``."""
    runs = [
        GroupBlocks(
            run.group,
            indices.start,
            run.block_ids[indices.start : indices.stop],
            run.generations[indices.start : indices.stop],
        )
        for run in whole.blocks
        if run.group in groups
    ]
    return msgspec.structs.replace(
        whole,
        piece=piece,
        blocks=tuple(runs),
        num_tokens=NUM_TOKENS if last else indices.stop * BLOCK_SIZE,
        last=last,
        first_token=whole.first_token if last else None,
    )


def test_c24_layers_that_no_piece_has_of_a_block_are_noticed_before_delivery(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    ask(decode, prefill)
    whole = prefill.compute(R, decode.now, num_blocks=NUM_BLOCKS)
    # Given pieces that name every block, and have every layer, but not every layer of every block
    decode.ticket(part(whole, PieceId(0, 0, 0), range(2, NUM_BLOCKS), last=True))
    decode.ticket(part(whole, PieceId(0, LAST_LAYER, 0), range(2), last=True))
    # When all of them have landed
    decode.land_all()
    # Then the request is not delivered with what nobody wrote
    assert R not in decode.delivered
    assert "no ticket names blocks [2, 3] of group 0" in decode.failed[R].reason


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 2, 0, 3), (2, 0, 1, 3)])
def test_c24_nothing_is_delivered_while_a_piece_of_it_is_read(
    decode: DecodeSide, prefill: PrefillSide, order: tuple[int, ...]
) -> None:
    ask(decode, prefill)
    whole = prefill.compute(R, decode.now, num_blocks=NUM_BLOCKS)
    # Given chunk 0 in pieces of which one alone has all layers, and chunk 1
    pieces = [
        part(whole, PieceId(0, LAST_LAYER, 0), range(2), last=False),
        part(whole, PieceId(0, 0, 0), range(2, 3), last=False),
        part(whole, PieceId(1, LAST_LAYER, 0), range(2, 3), last=False),
        part(whole, PieceId(0, LAST_LAYER, 1), range(3, NUM_BLOCKS), last=True),
    ]
    for number in order:
        decode.ticket(pieces[number])
    operations = {number: OperationId(1 + at) for at, number in enumerate(order)}
    # When those land first that have each layer of each chunk
    for number in (0, 3, 1):
        decode.carry_out(decode.reader.landed(operations[number], decode.now))
        assert R not in decode.delivered
    # Then it waits for the last one
    decode.carry_out(decode.reader.landed(operations[2], decode.now))
    assert R in decode.delivered
    decode.blocks.settle(R, NUM_TOKENS)  # raises while a read may write one of its blocks


def test_d16_a_block_that_no_window_needs_is_not_given_memory(make_decode: MakeDecode) -> None:
    """Memory is promised for what decode will read; what is more would be taken from others."""
    groups = (KVGroup(layers=(0, 1)), KVGroup(layers=(2, 3), window=BLOCK_SIZE))
    plain = layout(2)
    windowed = KVLayout(groups, BLOCK_SIZE, num_kv_heads=1, head_dim=1, dtype=plain.dtype)
    decode = make_decode(windowed)
    source = PrefillSide(decode.nic.network, windowed)
    ask(decode, source)
    whole = source.compute(R, decode.now, num_blocks=NUM_BLOCKS)
    decode.ticket(whole)
    assert "names blocks that no window needs" in decode.failed[R].reason
    assert decode.num_free == 10
