"""Bytes that are not what the source has must be found before the first token.

A read that completes says that bytes have arrived, not which. Where the source sends digests, one
flipped byte ends the request, of all pieces, and it is computed or read anew.
"""

import hashlib

import msgspec
import pytest

from blockmgr.states import BlockState
from core.ids import BlockId
from core.messages import PieceId, Ticket
from tests.transfer.adversary import Network
from tests.transfer.two_sides import DecodeSide, Pool, PrefillSide, layout, owner
from transfer.extents import LayerSpan

R, OTHER = owner("r"), owner("other")


def digests_of(pool: Pool, block_ids: list[BlockId], span: LayerSpan) -> list[bytes]:
    rows = pool.rows[:, span.offset : span.offset + span.nbytes]
    return [hashlib.blake2b(rows[at].copy().data, digest_size=8).digest() for at in block_ids]


class CheckingSide(DecodeSide):
    """Compares what has landed, as the receiver of a decode worker does."""

    def poll(self) -> None:
        for outcome in self.nic.poll():
            operation = self.operation_of_read[outcome.read]
            expected = self.reader.expected_digests(operation)
            if expected is None or expected.match(
                lambda ids, span: digests_of(self.pool, ids, span)
            ):
                self.carry_out(self.reader.landed(operation, self.now))
            else:
                self.carry_out(self.reader.damaged(operation, self.now))


def with_digests(source: PrefillSide, ticket: Ticket) -> Ticket:
    span = LayerSpan.of_piece(ticket.piece, source.layout)
    blocks = tuple(
        msgspec.structs.replace(
            run, digests=tuple(digests_of(source.pool, list(run.block_ids), span))
        )
        for run in ticket.blocks
    )
    return msgspec.structs.replace(ticket, blocks=blocks)


@pytest.fixture
def sides() -> tuple[CheckingSide, PrefillSide]:
    network = Network()
    source = PrefillSide(network, layout(layers_per_group=2))
    side = CheckingSide(network, layout(layers_per_group=2), num_blocks=12)
    side.pair(source)
    return side, source


def offer(side: CheckingSide, source: PrefillSide) -> None:
    """R is read in two pieces, a layer and two blocks each."""
    side.request(R, source)
    for layer in (0, 1):
        ticket = source.compute(
            R, side.now, first_index=2 * layer, num_blocks=2, piece=PieceId(layer, layer, 0)
        )
        side.ticket(with_digests(source, ticket))


def test_i07_what_arrives_as_it_was_sent_is_delivered(
    sides: tuple[CheckingSide, PrefillSide],
) -> None:
    side, source = sides
    offer(side, source)
    # The blocks lie at other places here than there: an id is no part of a digest
    sources = source.held[R]
    targets = side.blocks.block_tables(R)[0].tolist()
    assert sources != targets
    side.land_all()
    assert R in side.delivered
    assert side.reader.stats.checksum_failures == 0
    side.check()


@pytest.mark.parametrize("layer", [0, 1])
def test_i07_one_flipped_byte_in_one_piece_ends_the_whole_request(
    sides: tuple[CheckingSide, PrefillSide], layer: int
) -> None:
    side, source = sides
    offer(side, source)
    side.nic.finish()
    damaged = int(side.blocks.block_tables(R)[0][2 * layer])
    side.pool.rows[damaged, layer * side.layout.layer_nbytes + 17] ^= 1
    side.poll()
    # Then no token of it is trusted, and everything is given back
    assert R not in side.delivered
    assert side.failed[R].is_retryable
    assert "other bytes" in side.failed[R].reason
    assert side.reader.stats.checksum_failures == 1
    assert side.reader.stats.failures["integrity"] == 1
    assert side.count(BlockState.FREE) == 12
    # And the source's endpoint goes on: the link is not lost
    assert side.torn == []
    side.exchange()
    assert len(source.free) == 64
    side.check()


def test_i07_other_requests_of_the_source_go_on(sides: tuple[CheckingSide, PrefillSide]) -> None:
    side, source = sides
    offer(side, source)
    side.request(OTHER, source)
    for layer in (0, 1):
        piece = PieceId(layer, layer, 0)
        ticket = source.compute(OTHER, side.now, first_index=layer, num_blocks=1, piece=piece)
        side.ticket(with_digests(source, ticket))
    side.nic.finish()
    side.pool.rows[int(side.blocks.block_tables(R)[0][0]), 0] ^= 0x80
    side.poll()
    assert list(side.delivered) == [OTHER]
    assert list(side.failed) == [R]


def test_i07_without_the_comparison_the_damage_is_trusted(
    sides: tuple[CheckingSide, PrefillSide],
) -> None:
    side, source = sides
    offer(side, source)
    side.nic.finish()
    side.pool.rows[int(side.blocks.block_tables(R)[0][0]), 0] ^= 0x80
    DecodeSide.poll(side)
    assert R in side.delivered
    assert side.wrong_positions(R) != []


def test_i07_digests_that_do_not_match_the_blocks_in_number_are_refused(
    sides: tuple[CheckingSide, PrefillSide],
) -> None:
    side, source = sides
    side.request(R, source)
    ticket = with_digests(source, source.compute(R, side.now, num_blocks=2, piece=PieceId(0, 1, 0)))
    (run,) = ticket.blocks
    short = msgspec.structs.replace(run, digests=run.digests[:1])
    side.ticket(msgspec.structs.replace(ticket, blocks=(short,)))
    assert "malformed" in side.failed[R].reason
