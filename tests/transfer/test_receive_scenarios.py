"""From tickets to a delivered request: every piece once, each byte at its own position.

The failure guarded: bytes are trusted that are not the request's own, or not all of them.
"""

import numpy as np
import pytest

from blockmgr.states import BlockState
from core.errors import InternalError
from core.ids import BlockId, Generation
from core.messages import GroupBlocks, PieceId, Reading, Released
from tests.transfer.adversary import Network
from tests.transfer.conftest import MakeDecode
from tests.transfer.one_receive import R, start
from tests.transfer.two_sides import DecodeSide, PrefillSide, layout, owner, with_blocks
from transfer.endpoints import Endpoints
from transfer.extents import LayerSpan, merge_pairs
from transfer.reader import Reader
from transfer.receiving import Receiving


def test_delivery_brings_every_byte_to_its_position_and_frees_the_source(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    start(decode, prefill)
    decode.land_all()
    decode.exchange()

    assert decode.delivered[R].first_token.token_id == 7
    assert decode.wrong_positions(R) == []
    assert decode.count(BlockState.ACTIVE) == 3
    assert len(prefill.free) == 64
    assert decode.reader.next_deadline() is None


def test_c05_duplicate_completion_changes_nothing(decode: DecodeSide, prefill: PrefillSide) -> None:
    start(decode, prefill)
    decode.nic.duplicates_outcomes = True
    decode.land_all()
    assert list(decode.delivered) == [R]
    assert decode.reader.stats.stale["outcome"] == 1
    assert decode.count(BlockState.ACTIVE) == 3


def test_c05_duplicate_ticket_is_dropped(decode: DecodeSide, prefill: PrefillSide) -> None:
    decode.request(R, prefill)
    ticket = prefill.compute(R, 0, num_blocks=3)
    decode.ticket(ticket)
    decode.ticket(ticket)
    assert decode.reader.stats.stale["duplicate_ticket"] == 1
    assert decode.count(BlockState.RECEIVING) == 3
    decode.land_all()
    decode.ticket(ticket)
    assert decode.reader.stats.stale["ticket"] == 1
    assert list(decode.delivered) == [R]


def test_c10_partial_hit_pairs_by_absolute_index(decode: DecodeSide, prefill: PrefillSide) -> None:
    """100 tokens: P holds 7 blocks, D has the first 3."""
    decode.request(R, prefill, cached_blocks=3)
    decode.ticket(prefill.compute(R, 0, first_index=3, num_blocks=4))
    decode.land_all()
    assert R in decode.delivered
    assert decode.wrong_positions(R, first_index=3) == []


def test_c10_front_trimmed_pairing_is_refused(decode: DecodeSide, prefill: PrefillSide) -> None:
    """Blocks 3 to 6 of the source must not fill positions 0 to 3."""
    decode.auto_allocate = False
    decode.request(R, prefill)
    ticket = prefill.compute(R, 0, first_index=3, num_blocks=4)
    decode.ticket(ticket)
    trimmed = with_blocks(
        ticket, [GroupBlocks(0, 0, run.block_ids, run.generations) for run in ticket.blocks]
    )
    with pytest.raises(InternalError, match=r"\[3, 7\).*\[0, 4\)"):
        decode.allocate(R, trimmed)
    decode.blocks.end_operation(1)
    assert decode.nic.writes == []


def test_c10_mutation_pairing_in_order_puts_kv_at_wrong_positions(
    monkeypatch: pytest.MonkeyPatch, decode: DecodeSide, prefill: PrefillSide
) -> None:
    """The oracle has teeth: with pairing by order instead of index, it finds wrong bytes."""

    def by_order(source: list[GroupBlocks], target: list[GroupBlocks]) -> np.ndarray:
        remote = [block for run in source for block in run.block_ids]
        local = [block for run in target for block in run.block_ids]
        return np.array([local, remote[::-1]]).T

    monkeypatch.setattr("transfer.extents.pair_positions", by_order)
    decode.request(R, prefill, cached_blocks=3)
    decode.ticket(prefill.compute(R, 0, first_index=3, num_blocks=4))
    decode.land_all()
    assert len(decode.wrong_positions(R, first_index=3)) == 4


def test_c13_prompt_shorter_than_a_block_is_read_and_released(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    start(decode, prefill, num_blocks=1)
    decode.land_all()
    decode.exchange()
    assert R in decode.delivered
    assert Released(*R, prefill.incarnation) in decode.sent
    assert prefill.book.next_deadline() is None, "nothing stays pinned until a lease ends"


def test_c12_ticket_without_blocks_needs_no_read(decode: DecodeSide, prefill: PrefillSide) -> None:
    decode.request(R, prefill)
    decode.ticket(prefill.compute(R, 0, num_blocks=0))
    decode.exchange()
    assert R in decode.delivered
    assert len(prefill.book) == 0


def test_c17_two_half_received_requests_do_not_park_each_other(
    network: Network, make_decode: MakeDecode
) -> None:
    """Pool of 7: A has 4 of 5 blocks, B 3 of 4. B is rolled back, A completes, then B."""
    prefill = PrefillSide(network, layout())
    decode = make_decode(num_blocks=7)
    decode.pair(prefill)
    a, b = owner("a"), owner("b")
    for who, count in ((a, 4), (b, 3)):
        decode.request(who, prefill)
        decode.ticket(prefill.compute(who, 0, num_blocks=count, piece=PieceId(0, 1, 0), last=False))
    decode.land_all()
    for who, count in ((a, 4), (b, 3)):
        decode.ticket(
            prefill.compute(who, 0, first_index=count, num_blocks=1, piece=PieceId(0, 1, 1))
        )
    assert decode.num_free == 0
    assert [who for who, _ in decode.reader.unallocated()] == [a, b]

    decode.roll_back(b)
    decode.retry()
    decode.land_all()
    assert list(decode.delivered) == [a]
    assert decode.wrong_positions(a) == []
    decode.forget(a)
    decode.retry()
    decode.land_all()
    assert list(decode.delivered) == [a, b]
    assert decode.wrong_positions(b) == []
    decode.exchange()
    assert len(prefill.free) == 64


def test_c24_a_duplicate_of_one_piece_does_not_replace_another(
    make_decode: MakeDecode, prefill: PrefillSide
) -> None:
    """2 layers x 4 chunks: delivery needs all eight, in any order."""
    decode = make_decode(num_blocks=32)
    decode.pair(prefill)
    decode.request(R, prefill)
    tickets = [
        prefill.compute(
            R,
            0,
            first_index=4 * chunk + 2 * layer,
            num_blocks=2,
            piece=PieceId(layer, layer, chunk),
            last=chunk == 3,
        )
        for chunk in (3, 1, 0, 2)
        for layer in (0, 1)
    ]
    for ticket in tickets[:-1]:
        decode.ticket(ticket)
        decode.land_all()
        decode.ticket(ticket)
        decode.land_all()
    assert R not in decode.delivered
    assert decode.reader.stats.stale["duplicate_ticket"] == 7
    decode.ticket(tickets[-1])
    decode.land_all()
    assert R in decode.delivered


def test_c24_mutation_counting_pieces_delivers_too_early(
    monkeypatch: pytest.MonkeyPatch, decode: DecodeSide, prefill: PrefillSide
) -> None:
    """With a counter, two pieces of the last chunk pass for two chunks."""

    def by_count(entry: Receiving) -> bool:
        return entry.last_chunk is not None and len(list(entry.landed())) >= 2

    monkeypatch.setattr(Receiving, "is_complete", by_count)
    decode.request(R, prefill)
    for layer in (0, 1):
        piece = PieceId(layer, layer, 1)
        decode.ticket(
            prefill.compute(R, 0, first_index=2 * layer, num_blocks=2, piece=piece, last=True)
        )
    decode.land_all()
    assert R in decode.delivered, "chunk 0 is missing, and the mutant did not see it"


def test_i01_reoffered_piece_with_other_generations_ends_the_request(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    """The source broke its promise: what was read from the old blocks cannot be trusted."""
    decode.request(R, prefill)
    ticket = prefill.compute(R, 0, num_blocks=3)
    decode.ticket(ticket)
    (run,) = ticket.blocks
    reused = GroupBlocks(0, 0, run.block_ids, tuple(Generation(2) for _ in run.generations))
    decode.ticket(with_blocks(ticket, [reused]))
    decode.land_all()
    assert "generations" in decode.failed[R].reason
    assert R not in decode.delivered
    assert decode.num_free == 10


def test_i02_one_piece_twice_is_not_two_pieces(decode: DecodeSide, prefill: PrefillSide) -> None:
    decode.request(R, prefill)
    ticket = prefill.compute(R, 0, num_blocks=2, piece=PieceId(0, 0, 0))
    decode.ticket(ticket)
    decode.nic.duplicates_outcomes = True
    decode.land_all()
    assert R not in decode.delivered
    decode.ticket(prefill.compute(R, 0, first_index=2, num_blocks=2, piece=PieceId(1, 1, 0)))
    decode.land_all()
    assert R in decode.delivered


def test_d15_tickets_of_an_older_life_of_the_source_are_dropped(
    network: Network, decode: DecodeSide, prefill: PrefillSide
) -> None:
    restarted = PrefillSide(network, layout(), "P2")
    decode.pair(restarted)
    decode.request(R, restarted)
    decode.ticket(prefill.compute(R, 0, num_blocks=3))
    assert decode.reader.stats.stale["ticket"] == 1
    assert decode.nic.writes == []
    decode.ticket(restarted.compute(R, 0, num_blocks=3))
    decode.land_all()
    assert R in decode.delivered


def test_malformed_tickets_end_the_request_cleanly(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    bad_layer = PieceId(0, 2, 0)
    decode.request(R, prefill)
    decode.ticket(prefill.compute(R, 0, num_blocks=1, piece=bad_layer))
    assert "does not exist" in decode.failed[R].reason

    other = owner("other")
    decode.request(other, prefill)
    ticket = prefill.compute(other, 0, num_blocks=2)
    decode.ticket(with_blocks(ticket, [GroupBlocks(3, 0, (BlockId(1),), (Generation(1),))]))
    assert "malformed" in decode.failed[other].reason
    assert decode.num_free == 10


def test_reading_edges_bracket_every_read(decode: DecodeSide, prefill: PrefillSide) -> None:
    start(decode, prefill)
    assert decode.sent == [Reading(active=True)], "told before the read is posted"
    second = owner("second")
    decode.request(second, prefill)
    decode.ticket(prefill.compute(second, 0, num_blocks=2))
    decode.cancel(second)
    decode.land_all()
    edges = [message for message in decode.sent if isinstance(message, Reading)]
    assert edges == [Reading(active=True), Reading(active=False)]


def test_layer_ranges_read_only_their_part_of_each_block() -> None:
    kv = layout(layers_per_group=4)
    span = LayerSpan.of_piece(PieceId(1, 2, 0), kv)
    layer = kv.block_nbytes // 4
    extents = merge_pairs(np.array([[2, 5], [3, 6]]), span)
    assert extents.tolist() == [
        [2 * kv.block_nbytes + layer, 5 * kv.block_nbytes + layer, 2 * layer],
        [3 * kv.block_nbytes + layer, 6 * kv.block_nbytes + layer, 2 * layer],
    ]


def test_unknown_owners_and_operations_are_harmless(decode: DecodeSide) -> None:
    nobody = owner("nobody")
    assert decode.reader.cancel(nobody, 0) == []
    assert decode.reader.roll_back(nobody, 0) == []
    assert decode.reader.landed(99, 0) == []
    assert isinstance(decode.reader._endpoints, Endpoints)
    assert Reader.__doc__ is not None
