"""What must hold from a ticket to a delivered request, whatever the network does in between.

The failure guarded: a block that a read may still write is given to somebody else, or bytes are
trusted that are not, or no longer, the request's own.
"""

import numpy as np
import pytest

from blockmgr.states import BlockState
from core.config import TransferConfig
from core.errors import InternalError
from core.ids import BlockId, Generation, OperationId
from core.messages import GroupBlocks, PieceId, PrefillFailed, Reading, Released, Withdraw
from tests.transfer.adversary import Network
from tests.transfer.conftest import MakeDecode
from tests.transfer.two_sides import DecodeSide, PrefillSide, layout, owner, with_blocks
from transfer.actions import Action, OperationTerminal, Send, TearDown, WarmUp
from transfer.endpoints import Endpoints
from transfer.extents import LayerSpan, merge_pairs
from transfer.operations import Operation
from transfer.reader import Reader
from transfer.reader_states import PieceState
from transfer.receiving import Piece, Receiving
from transfer.receptions import Receptions

R = owner("r")


def start(decode: DecodeSide, prefill: PrefillSide, num_blocks: int = 3) -> None:
    """R is RECEIVING ``num_blocks`` blocks in one piece, its read is posted."""
    decode.request(R, prefill)
    decode.ticket(prefill.compute(R, decode.now, num_blocks=num_blocks))
    assert decode.count(BlockState.RECEIVING) == num_blocks


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


def test_c01_abort_while_two_pieces_are_read(decode: DecodeSide, prefill: PrefillSide) -> None:
    decode.request(R, prefill)
    for layer in (0, 1):
        piece = PieceId(layer, layer, 0)
        ticket = prefill.compute(R, 0, num_blocks=2, first_index=2 * layer, piece=piece)
        decode.ticket(ticket)
    decode.cancel(R)

    assert not decode.reader.is_receiving(R)
    assert Withdraw(*R) in decode.sent
    assert decode.count(BlockState.QUARANTINED) == 4
    first = [write for write in decode.nic.writes if write.read == 1]
    for write in first:
        decode.nic.writes.remove(write)
        write.land()
    decode.poll()
    assert decode.count(BlockState.QUARANTINED) == 2
    decode.land_all()
    assert decode.num_free == 10
    assert decode.delivered == {}
    assert decode.failed == {}


def test_c02_abort_after_delivery_frees_at_once(decode: DecodeSide, prefill: PrefillSide) -> None:
    start(decode, prefill)
    decode.land_all()
    decode.cancel(R)
    assert decode.num_free == 10


def test_c02_abort_after_landing_before_promotion_frees_at_once(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    start(decode, prefill)
    decode.now += 31  # the lease is not proven any more: R is CONFIRMING
    decode.land_all()
    assert R not in decode.delivered
    decode.cancel(R)
    assert decode.num_free == 10
    decode.exchange()
    assert R not in decode.delivered


@pytest.mark.parametrize("abort_first", [True, False])
def test_c03_abort_and_completion_in_one_poll(
    decode: DecodeSide, prefill: PrefillSide, *, abort_first: bool
) -> None:
    start(decode, prefill)
    decode.nic.finish()
    steps = [lambda: decode.cancel(R), decode.poll]
    for step in steps if abort_first else reversed(steps):
        step()
    assert decode.num_free == 10
    assert len(decode.ended) == 1


def test_c04_third_late_completion_is_counted_and_dropped(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    start(decode, prefill)
    decode.cancel(R)
    decode.exchange()
    decode.land_all()
    assert decode.num_free == 10
    (operation,) = decode.ended
    decode.carry_out(decode.reader.landed(operation, decode.now))
    decode.carry_out(decode.reader.read_failed(operation, "late", decode.now))
    assert decode.reader.stats.stale["outcome"] == 2
    assert len(decode.ended) == 1


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


def test_c20_peer_dies_mid_receive(decode: DecodeSide, prefill: PrefillSide) -> None:
    """No completion will ever come: R fails at once, its blocks only after the teardown."""
    start(decode, prefill)
    decode.nic.step()
    decode.nic.freeze(prefill.incarnation)
    actions = decode.reader.source_lost(prefill.incarnation, "connection closed", decode.now)
    first, *rest = actions
    decode.carry_out(rest)
    assert decode.failed[R].is_retryable
    assert decode.count(BlockState.QUARANTINED) == 3
    assert decode.num_free == 7, "quarantined blocks cannot be allocated"
    decode.carry_out([first])
    assert decode.torn == [prefill.incarnation]
    assert decode.num_free == 10


def test_c20_bound_without_any_event(decode: DecodeSide, prefill: PrefillSide) -> None:
    """The source is frozen: the read's own timeout ends it."""
    start(decode, prefill)
    decode.nic.freeze(prefill.incarnation)
    for _ in range(20):
        deadline = decode.reader.next_deadline()
        if deadline is None:
            break
        decode.now = deadline
        decode.tick()
    assert decode.torn == [prefill.incarnation]
    assert decode.failed[R].is_retryable
    assert decode.num_free == 10
    assert decode.reader.stats.read_timeouts == 1


def test_c20_a_read_that_waits_its_turn_is_not_held_against_its_source(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    """It is held back behind others, in the queue or for room: its source knows nothing of it."""
    config = TransferConfig()
    reader, source = decode.reader, prefill.incarnation
    reader.warm_up(OperationId(91), source)
    assert reader.next_deadline() is None
    assert reader.tick(decode.now + 10 * config.read_timeout_s) == []
    began_at = decode.now + 11 * config.read_timeout_s
    reader.begun(OperationId(91), began_at)
    reader.begun(OperationId(91), began_at + 1.0)  # of what has begun, nothing begins again
    assert reader.next_deadline() == began_at + config.read_timeout_s
    (action,) = reader.tick(began_at + config.read_timeout_s)
    assert isinstance(action, TearDown)
    reader.read_failed(OperationId(91), "torn", began_at + config.read_timeout_s)
    reader.begun(OperationId(91), began_at)
    assert reader.next_deadline() is None


def test_c21_cancel_is_not_proof(decode: DecodeSide, prefill: PrefillSide) -> None:
    """The library's cancel returns, the write lands later: the next owner's bytes stand."""
    start(decode, prefill, num_blocks=6)
    for read in list(decode.nic.pending):
        decode.nic.cancel(read)
    decode.cancel(R)
    other = owner("other")
    decode.request(other, prefill)
    decode.ticket(prefill.compute(other, 0, num_blocks=4))
    landing = [write for write in decode.nic.writes if write.read == 2]
    for write in landing:
        decode.nic.writes.remove(write)
        write.land()
    decode.poll()
    assert decode.wrong_positions(other) == []
    decode.land_all()  # R's writes, 50 ms late
    assert decode.wrong_positions(other) == []


def test_c21_what_is_not_posted_yet_is_taken_back_and_is_no_failure_of_its_source(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    start(decode, prefill, num_blocks=4)
    other = owner("other")
    decode.request(other, prefill)
    decode.ticket(prefill.compute(other, decode.now, num_blocks=4))
    first, second = OperationId(1), OperationId(2)
    # When R's client leaves and none of its read was posted yet
    decode.cancel(R)
    assert decode.cancelled == [first]
    assert decode.count(BlockState.QUARANTINED) == 4
    decode.nic.writes = [write for write in decode.nic.writes if write.read != 1]
    del decode.nic.pending[1]
    decode.carry_out(decode.reader.read_cancelled(first))
    # Then its blocks are free at once, and its source goes on serving others
    assert decode.count(BlockState.QUARANTINED) == 0
    assert decode.torn == []
    assert decode.reader.stats.reads_cancelled == 1
    decode.land_all()
    assert other in decode.delivered
    assert decode.reader.read_cancelled(second) == [], "it has ended"


def test_c21_a_rolled_back_read_is_taken_back_too(decode: DecodeSide, prefill: PrefillSide) -> None:
    start(decode, prefill, num_blocks=4)
    decode.roll_back(R)
    assert decode.cancelled == [OperationId(1)]


def test_a_read_that_somebody_waits_for_is_never_taken_back(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    start(decode, prefill, num_blocks=4)
    with pytest.raises(InternalError, match="waits"):
        decode.reader.read_cancelled(OperationId(1))
    decode.reader._endpoints.begin(  # let the fixture validate
        Operation(
            OperationId(1),
            prefill.incarnation,
            R,
            PieceId(0, 1, 0),
            frozenset({BlockId(4)}),
            4,
        )
    )
    decode.nic.finish()


def test_a_warm_up_holds_no_block_and_is_bounded_as_every_read(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    source, reader = prefill.incarnation, decode.reader
    first, second = OperationId(91), OperationId(92)
    assert reader.warm_up(first, source) == [
        Send(source, Reading(active=True)),
        WarmUp(first, source),
    ]
    assert reader.is_in_use(source)
    assert reader.num_quarantined_blocks == 0
    assert reader.landed(first, 101.0) == [Send(source, Reading(active=False))]
    assert not reader.is_in_use(source)
    reader.warm_up(second, source)
    reader.begun(second, 102.0)
    assert reader.next_deadline() == 102.0 + TransferConfig().read_timeout_s
    (action,) = reader.tick(200.0)
    assert isinstance(action, TearDown)
    assert not any(
        isinstance(action, OperationTerminal) for action in reader.read_failed(second, "torn", 200)
    )


def test_c21_mutation_trusting_cancel_corrupts_the_next_owner(
    make_decode: MakeDecode, prefill: PrefillSide
) -> None:
    class TrustsCancel(Receptions):
        def abandon(self, piece: Piece) -> list[Action]:
            actions = super().abandon(piece)
            if piece.state is PieceState.READING and piece.operation is not None:
                decode.blocks.end_operation(piece.operation)  # "cancelled, so it is over"
            return actions

    decode = make_decode()
    decode.reader._requests.__class__ = TrustsCancel
    decode.pair(prefill)
    start(decode, prefill, num_blocks=6)
    decode.cancel(R)
    other = owner("other")
    decode.request(other, prefill)
    decode.ticket(prefill.compute(other, 0, num_blocks=6))
    for write in [write for write in decode.nic.writes if write.read == 2]:
        decode.nic.writes.remove(write)
        write.land()
    decode.poll()
    for write in decode.nic.writes:
        write.land()
    assert decode.wrong_positions(other) != []


def test_c22_prefill_side_abort_after_allocation(decode: DecodeSide, prefill: PrefillSide) -> None:
    start(decode, prefill)
    decode.nic.step()
    message = PrefillFailed(*R, prefill.incarnation, "step failed")
    decode.carry_out(decode.reader.prefill_failed(message, decode.now))
    assert decode.failed[R].is_retryable
    assert "step failed" in decode.failed[R].reason
    assert decode.count(BlockState.QUARANTINED) == 3
    decode.land_all()
    assert decode.num_free == 10
    assert decode.delivered == {}
    decode.exchange()
    assert len(prefill.free) == 64, "the source was told, so it need not wait for its lease"


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


def test_i01_late_completion_of_a_rolled_back_read_fills_nothing(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    """The old read of the same piece ends while the new one is still on its way."""
    start(decode, prefill)
    decode.roll_back(R)
    decode.retry()
    assert decode.count(BlockState.QUARANTINED) == 3
    for write in [write for write in decode.nic.writes if write.read == 1]:
        decode.nic.writes.remove(write)
        write.land()
    decode.poll()
    assert R not in decode.delivered
    assert decode.count(BlockState.RECEIVING) == 3
    decode.land_all()
    assert R in decode.delivered
    assert decode.wrong_positions(R) == []


def test_i01_mutation_without_the_operation_check_trusts_unwritten_blocks(
    make_decode: MakeDecode, prefill: PrefillSide
) -> None:
    class NoCheck(Receptions):
        def filled_by(self, pending: Operation) -> tuple[Receiving, Piece] | None:
            entry = self._entries[pending.owner]
            return entry, entry.pieces[pending.piece]

    decode = make_decode()
    decode.reader._requests.__class__ = NoCheck
    decode.pair(prefill)
    start(decode, prefill)
    decode.roll_back(R)
    decode.retry()
    for write in [write for write in decode.nic.writes if write.read == 1]:
        decode.nic.writes.remove(write)
        write.land()
    decode.poll()
    assert R in decode.delivered
    assert decode.wrong_positions(R) != []
    for write in decode.nic.writes:
        write.land()
    decode.reader._requests.__class__ = Receptions
    decode.reader._endpoints.quarantine(decode.operation_of_read[2])  # let the fixture validate
    decode.nic.writes.clear()
    decode.poll()


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


def test_i06_a_timer_without_proof_frees_nothing(decode: DecodeSide, prefill: PrefillSide) -> None:
    start(decode, prefill)
    decode.nic.freeze(prefill.incarnation)
    decode.cancel(R)
    decode.now += 10_000
    assert decode.count(BlockState.QUARANTINED) == 3
    decode.tick()
    assert decode.torn == [prefill.incarnation]
    assert decode.num_free == 10


def test_h01_another_attempt_is_another_request(decode: DecodeSide, prefill: PrefillSide) -> None:
    """Attempt 1 was given up here; its ticket and its read never satisfy attempt 2."""
    start(decode, prefill)
    decode.cancel(R)
    second = owner("r", attempt=2)
    decode.request(second, prefill)
    late = prefill.compute(R, 0, first_index=5, num_blocks=1, piece=PieceId(0, 1, 1))
    decode.ticket(late)
    assert decode.reader.stats.stale["ticket"] == 1
    decode.land_all()
    assert decode.delivered == {}
    decode.ticket(prefill.compute(second, 0, num_blocks=2))
    decode.land_all()
    assert list(decode.delivered) == [second]
    assert decode.wrong_positions(second) == []


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


def test_h07_a_read_that_cannot_be_posted_fails_only_its_request(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    decode.request(R, prefill)
    decode.nic.kill(prefill.incarnation)
    decode.ticket(prefill.compute(R, 0, num_blocks=3))
    assert decode.failed[R].is_retryable
    assert decode.num_free == 10
    assert decode.torn == [prefill.incarnation], "the worker pairs with the source anew"


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


def test_quarantine_over_its_limit_tears_down_the_oldest_peer_only(
    network: Network, make_decode: MakeDecode, prefill: PrefillSide
) -> None:
    healthy = PrefillSide(network, layout(), "Q")
    decode = make_decode(num_blocks=20, max_quarantined_blocks=4)
    decode.pair(prefill)
    decode.pair(healthy)
    start(decode, prefill)
    decode.nic.freeze(prefill.incarnation)
    good = owner("good")
    decode.request(good, healthy)
    decode.ticket(healthy.compute(good, 0, num_blocks=4))
    decode.cancel(R)
    assert decode.torn == []
    late = owner("late")
    decode.request(late, prefill)
    decode.ticket(prefill.compute(late, 0, num_blocks=2))
    decode.cancel(late)

    assert decode.torn == [prefill.incarnation]
    assert decode.reader.stats.quarantine_alarms == 1
    assert decode.count(BlockState.QUARANTINED) == 0
    decode.land_all()
    assert list(decode.delivered) == [good]


def test_prefill_that_never_comes_is_bounded(decode: DecodeSide, prefill: PrefillSide) -> None:
    decode.request(R, prefill)
    decode.now += 121
    decode.tick()
    assert decode.failed[R].is_retryable
    assert Withdraw(*R) in decode.sent


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
