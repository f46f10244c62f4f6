"""A prompt in any pieces, in any order, is delivered exactly when its last byte is here.

Pieces of different layers, or of different groups, fill the same positions by a read each. Counting
them is not enough: one that comes twice does not stand for one that is missing (C24).
"""

import itertools
import random
from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from core.ids import Owner
from core.messages import PieceId, Ticket
from tests.transfer.adversary import Network
from tests.transfer.two_sides import BLOCK_SIZE, DecodeSide, PrefillSide, layout, owner

R = owner()
NUM_LAYERS = 6
NUM_GROUPS = 2
NUM_BLOCKS = 2
"""In each of the two chunks."""


def cut(tickets: Sequence[Ticket], ends: Sequence[int], *, by_groups: bool) -> list[Ticket]:
    """Return the tickets with the last chunk cut behind the layers ``ends``, or by its groups."""
    *earlier, whole = tickets
    token = whole.first_token
    if by_groups:
        parts = [
            msgspec.structs.replace(
                whole,
                piece=msgspec.structs.replace(whole.piece, chunk=whole.piece.chunk + group),
                blocks=tuple(run for run in whole.blocks if run.group == group),
                last=group == NUM_GROUPS - 1,
                first_token=token if group == NUM_GROUPS - 1 else None,
            )
            for group in range(NUM_GROUPS)
        ]
    else:
        firsts = [0, *ends]
        lasts = [*(end - 1 for end in ends), NUM_LAYERS - 1]
        parts = [
            msgspec.structs.replace(
                whole,
                piece=PieceId(first, last, whole.piece.chunk),
                first_token=token if last == NUM_LAYERS - 1 else None,
            )
            for first, last in zip(firsts, lasts, strict=True)
        ]
    return [*earlier, *parts]


class TwoSides:
    """R with two chunks at a source, cut into tickets."""

    def __init__(
        self, ends: Sequence[int], *, by_groups: bool, max_quarantined_blocks: int = 1000
    ) -> None:
        kv = layout(NUM_GROUPS, NUM_LAYERS)
        network = Network()
        self.source = PrefillSide(network, kv)
        self.decode = DecodeSide(
            network, kv, num_blocks=16, max_quarantined_blocks=max_quarantined_blocks
        )
        self.decode.pair(self.source)
        self.decode.request(R, self.source)
        chunks = [
            self.source.compute(
                R,
                self.decode.now,
                first_index=chunk * NUM_BLOCKS,
                num_blocks=NUM_BLOCKS,
                piece=PieceId(0, NUM_LAYERS - 1, chunk),
                last=chunk == 1,
            )
            for chunk in range(2)
        ]
        self.tickets = cut(chunks, ends, by_groups=by_groups)

    def is_delivered(self, who: Owner = R) -> bool:
        return who in self.decode.delivered

    def finish(self) -> None:
        """Whatever happened, nothing is left when both sides are done."""
        self.decode.land_all()
        self.decode.cancel(R)
        self.decode.exchange()
        self.decode.land_all()
        self.decode.check()
        assert self.decode.num_free == 16
        assert R not in self.source.held


ENDS = st.sets(st.integers(1, NUM_LAYERS - 1)).map(sorted)
ORDERS = st.randoms(use_true_random=False)


@settings(max_examples=80, deadline=None)
@given(ends=ENDS, by_groups=st.booleans(), rng=ORDERS, num_twice=st.integers(0, 3))
def test_c24_a_prompt_is_delivered_with_its_last_piece_in_any_cut_and_order(
    ends: list[int], *, by_groups: bool, rng: random.Random, num_twice: int
) -> None:
    sides = TwoSides(ends, by_groups=by_groups)
    order = list(sides.tickets)
    if not by_groups:
        rng.shuffle(order)  # the last chunk is known as such from any of its ranges
    sent = [*order, *rng.sample(order, min(num_twice, len(order)))]
    missing = list(sides.tickets)
    for ticket in sent:
        assert not sides.is_delivered() or not missing
        sides.decode.ticket(ticket)
        if rng.random() < 0.5:
            sides.decode.land_all()
        missing = [other for other in missing if other.piece != ticket.piece]
    sides.decode.land_all()
    assert sides.is_delivered()
    assert not sides.decode.failed
    assert sides.decode.wrong_positions(R) == []
    assert sides.decode.reader.stats.stale["duplicate_ticket"] <= num_twice
    sides.finish()


@settings(max_examples=40, deadline=None)
@given(ends=ENDS, by_groups=st.booleans(), rng=ORDERS)
def test_c24_a_piece_that_is_lost_is_not_made_up_for_by_others_that_come_twice(
    ends: list[int], *, by_groups: bool, rng: random.Random
) -> None:
    sides = TwoSides(ends, by_groups=by_groups)
    lost = rng.choice(sides.tickets)
    rest = [ticket for ticket in sides.tickets if ticket is not lost]
    for ticket in [*rest, *rest, *rest]:
        sides.decode.ticket(ticket)
        sides.decode.land_all()
    assert not sides.is_delivered()
    sides.finish()


@settings(max_examples=40, deadline=None)
@given(ends=ENDS, by_groups=st.booleans(), rng=ORDERS)
def test_c21_a_request_rolled_back_between_pieces_is_read_again_into_other_blocks(
    ends: list[int], *, by_groups: bool, rng: random.Random
) -> None:
    # Given some pieces on their way, and some landed
    sides = TwoSides(ends, by_groups=by_groups)
    num_before = rng.randint(1, len(sides.tickets))
    for ticket in sides.tickets[:num_before]:
        sides.decode.ticket(ticket)
        if rng.random() < 0.5:
            sides.decode.land_all()
    if sides.is_delivered():
        return
    # When its memory is given back, and it is received anew, with the old reads still to land
    sides.decode.roll_back(R)
    sides.decode.retry()
    for ticket in sides.tickets[num_before:]:
        sides.decode.ticket(ticket)
    # Then all of it is here in the end, and of the first time nothing is left
    for _ in range(len(sides.tickets) + 1):
        sides.decode.land_all()
        sides.decode.retry()
    assert sides.is_delivered()
    assert sides.decode.wrong_positions(R) == []
    sides.finish()


def test_ranges_of_one_chunk_take_blocks_once() -> None:
    sides = TwoSides([2, 4], by_groups=False)
    for ticket in sides.tickets:
        sides.decode.ticket(ticket)
    assert sides.decode.num_free == 16 - 2 * NUM_GROUPS * NUM_BLOCKS
    operations = [op for op, _ in sides.decode.blocks._operations.items()]
    named = [sides.decode.blocks.operation_blocks(operation) for operation in operations]
    assert named[1] == named[2] == named[3]
    assert len(list(itertools.chain(*named))) == 4 * NUM_GROUPS * NUM_BLOCKS
    sides.decode.land_all()
    sides.finish()


def test_c20_a_block_that_several_reads_may_still_fill_is_in_quarantine_once() -> None:
    # Given a bound that just takes all of R's blocks
    sides = TwoSides([2, 4], by_groups=False, max_quarantined_blocks=8)
    for ticket in sides.tickets:
        sides.decode.ticket(ticket)
    # When R is cancelled while all four reads are under way, three of them of the same blocks
    sides.decode.cancel(R)
    # Then its source is not torn down for more blocks than there are
    assert sides.decode.reader.num_quarantined_blocks == 8
    assert not sides.decode.torn
    sides.finish()


def ask_for(sides: TwoSides, who: Owner, num_tokens: int) -> None:
    """Ask the source for all of ``who``, so that tickets are held to what was asked."""
    decode = sides.decode
    decode.blocks.admit(who, tokens=None, num_cached_tokens=0, num_tokens=0)
    wanted = range(num_tokens)
    source = sides.source.incarnation
    decode.carry_out(decode.reader.requested(who, source, decode.now, wanted=wanted))


def test_a_chunk_of_some_groups_may_end_in_the_prompts_last_block_without_being_the_last() -> None:
    sides = TwoSides([], by_groups=True)
    who, liar = owner("s"), owner("liar")
    for name in (who, liar):
        ask_for(sides, name, NUM_BLOCKS * BLOCK_SIZE - 5)
        ticket = sides.source.compute(name, sides.decode.now, num_blocks=NUM_BLOCKS)
        # One covers all that was asked for, the other ends in a block that is to be filled yet
        short = 5 if name == who else 6
        ticket = msgspec.structs.replace(ticket, num_tokens=ticket.num_tokens - short)
        for part in cut([ticket], [], by_groups=True):
            sides.decode.ticket(part)
    sides.decode.land_all()
    assert sides.is_delivered(who)
    assert "covers" in sides.decode.failed[liar].reason
    sides.decode.forget(who)
    sides.finish()
