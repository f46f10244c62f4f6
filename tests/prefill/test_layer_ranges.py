"""Layers of a prompt's last chunk are offered while later ones compute: all of them, each once.

What is offered too early is half-written; a range that names other blocks than its siblings would
spread one prompt over blocks that no reader can put together.
"""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockmgr.states import BlockState
from core.ids import Incarnation
from core.kv_layout import KVGroup, KVLayout
from core.messages import PieceId, Withdraw
from engine.batch import StepBatch
from prefill.cuts import Cut, CutPlan
from prefill.offers import SettledChunk
from prefill.scheduler import PrefillScheduler
from tests.prefill.bench import Bench
from transfer.tickets import Offer, TicketBook


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Ten blocks, one group of eight layers, four ranges."""
    made = Bench(10, num_layers=8, layer_ranges=4)
    yield made
    made.scheduler.check_invariants()


def ranges(offers: Sequence[SettledChunk]) -> list[tuple[int, int, int]]:
    return [(offer.chunk, offer.first_layer, offer.last_layer) for offer in offers]


def step(bench: Bench) -> StepBatch:
    batch = bench.scheduler.schedule()
    assert batch is not None
    return batch


def test_only_the_last_chunk_is_offered_in_layer_ranges(bench: Bench) -> None:
    bench.add("R", 70)
    offers = bench.run()
    assert ranges(offers) == [(0, 0, 7), (1, 0, 7), (2, 0, 1), (2, 2, 3), (2, 4, 5), (2, 6, 7)]
    assert [offer.is_last for offer in offers] == [False, False, True, True, True, True]
    assert [offer.first_token is not None for offer in offers] == [False] * 5 + [True]
    assert {offer.num_tokens for offer in offers[2:]} == {70}


def test_ranges_of_one_chunk_name_the_same_blocks_in_the_same_lives(bench: Bench) -> None:
    bench.add("R", 60)
    first, *rest = [offer for offer in bench.run() if offer.is_last]
    assert [named.first_index for named in first.blocks] == [2]
    assert len(first.blocks[0].block_ids) == 2
    assert [offer.blocks for offer in rest] == [first.blocks] * 3


def test_steps_that_end_no_prompt_have_no_marks(bench: Bench) -> None:
    bench.add("R", 70)
    assert [step(bench).layer_marks for _ in range(3)] == [(), (), (1, 3, 5)]


def test_b12_layers_are_offered_at_their_mark_and_not_before(bench: Bench) -> None:
    bench.add("R", 32)
    batch = step(bench)
    assert ranges(bench.scheduler.layers_done(batch.step, 1)) == [(0, 0, 1)]
    assert ranges(bench.scheduler.layers_done(batch.step, 1)) == [], "offered twice"
    assert ranges(bench.scheduler.layers_done(batch.step, 5)) == [(0, 2, 5)]
    assert ranges(bench.complete(batch)) == [(0, 6, 7)]


def test_a_model_that_reports_no_layers_is_offered_in_one_piece(bench: Bench) -> None:
    bench.add("R", 40)
    first, second = step(bench), step(bench)
    offers = [*bench.complete(first), *bench.complete(second)]
    assert ranges(offers) == [(0, 0, 7), (1, 0, 7)]


def test_b12_no_layer_is_offered_before_the_chunks_in_front_of_it_have_settled(
    bench: Bench,
) -> None:
    # Given a device that is ahead with the last chunk
    bench.add("R", 64)
    first, second = step(bench), step(bench)
    assert bench.scheduler.layers_done(second.step, 1) == []
    # When the chunk before has settled, it goes on with all that is complete
    bench.complete(first)
    assert ranges(bench.scheduler.layers_done(second.step, 3)) == [(1, 0, 3)]
    assert ranges(bench.complete(second)) == [(1, 4, 7)]


class OffersAhead(PrefillScheduler):
    """The guard switched off: what is before the part may still be computing."""

    def _is_computing(self, part: object) -> bool:
        return part is not None


def test_b12_fails_where_a_range_does_not_wait_for_the_chunks_in_front_of_it(
    bench: Bench,
) -> None:
    bench.scheduler.__class__ = OffersAhead
    bench.add("R", 64)
    step(bench)
    (offer,) = bench.scheduler.layers_done(step(bench).step, 1)
    assert offer.blocks[0].first_index == 0, "blocks of a step that has not completed"


def test_nothing_is_shared_before_its_step_has_completed(bench: Bench) -> None:
    # Given a prompt of which all but the last layers are offered
    bench.add("R", 32)
    batch = step(bench)
    assert len(bench.reach_marks(batch)) == 3
    # When another one with the same tokens comes
    bench.add("S", 32)
    # Then it computes them for itself: whole blocks can be hit, not some of their layers
    assert step(bench).num_tokens == 32
    bench.complete(batch)


def test_d08_cancel_between_ranges_frees_when_the_step_is_over(bench: Bench) -> None:
    owner = bench.add("R", 32)
    batch = step(bench)
    bench.scheduler.layers_done(batch.step, 1)
    assert bench.scheduler.cancel(owner)
    assert bench.blocks.counts()[BlockState.FENCED] == 2
    assert bench.scheduler.layers_done(batch.step, 3) == []
    assert bench.complete(batch) == []
    assert bench.blocks.num_allocatable == 10


def test_d10_another_attempt_is_not_offered_what_the_cancelled_one_computes(bench: Bench) -> None:
    owner = bench.add("R", 32)
    batch = step(bench)
    bench.scheduler.cancel(owner)
    again = bench.add("R", 32, attempt=2)
    offers = [*bench.reach_marks(batch), *bench.complete(batch), *bench.run()]
    assert {offer.prompt.owner for offer in offers} == {again}
    assert ranges(offers) == [(0, 0, 1), (0, 2, 3), (0, 4, 5), (0, 6, 7)]


def test_each_of_several_prompts_that_end_in_one_step_is_offered_in_ranges(bench: Bench) -> None:
    for number, name in enumerate("AB"):
        bench.add(name, 16, salt=1000 * number)
    offers = bench.run()
    for name in "AB":
        mine = [offer for offer in offers if offer.prompt.owner[0] == name]
        assert ranges(mine) == [(0, 0, 1), (0, 2, 3), (0, 4, 5), (0, 6, 7)]


def test_a_step_that_fails_between_ranges_offers_no_more(bench: Bench) -> None:
    owner = bench.add("R", 32)
    book = TicketBook(Incarnation("P"), lease_s=30.0)
    assert book.open(owner, reader="D")
    batch = step(bench)
    (offer,) = bench.scheduler.layers_done(batch.step, 1)
    assert book.issue(owner, offer_of(offer), 100.0) is not None
    bench.scheduler.fail_step(batch.step)
    # The reader may be at it: its answer, or the end of the lease, frees the blocks
    assert not book.revoke(owner)
    assert book.withdraw(Withdraw(*owner)) == owner
    assert bench.scheduler.cancel(owner)
    assert bench.blocks.num_allocatable == 10


def offer_of(offer: SettledChunk) -> Offer:
    return Offer(
        piece=PieceId(offer.first_layer, offer.last_layer, offer.chunk),
        blocks=offer.blocks,
        num_tokens=offer.num_tokens,
        last=offer.is_last,
        first_token=offer.first_token,
    )


def test_d16_ranges_name_only_what_the_window_leaves() -> None:
    made = Bench(20, windows=(None, 32), num_layers=4, layer_ranges=2)
    made.add("R", 100)
    last = [offer for offer in made.run() if offer.is_last]
    assert ranges(last) == [(3, 0, 1), (3, 2, 3)]
    for offer in last:
        named = [(run.group, run.first_index, len(run.block_ids)) for run in offer.blocks]
        assert named == [(0, 6, 1), (1, 6, 1)]
    made.scheduler.check_invariants()


def test_groups_of_early_layers_are_chunks_of_their_own() -> None:
    # Given a model whose layers are a group each, the fourth with a window
    made = Bench(30, windows=(None, None, None, 32), layer_ranges=2)
    made.add("R", 40)
    offers = made.run()
    # Then the last chunk comes as one for the first two layers, and one for the others
    assert [offer.chunk for offer in offers] == [0, 1, 2]
    assert [offer.is_last for offer in offers] == [False, False, True]
    assert [offer.num_tokens for offer in offers] == [32, 40, 40]
    assert [[run.group for run in offer.blocks] for offer in offers[1:]] == [[0, 1], [2, 3]]
    assert ranges(offers[1:]) == [(1, 0, 0), (2, 0, 0)]
    made.scheduler.check_invariants()


def test_a_mark_that_was_missed_is_made_up_for_by_the_next_one() -> None:
    made = Bench(30, windows=(None,) * 4, layer_ranges=4)
    made.add("R", 20)
    batch = step(made)
    assert batch.layer_marks == (0, 1, 2)
    (offer,) = made.scheduler.layers_done(batch.step, 1)
    assert [run.group for run in offer.blocks] == [0, 1]
    (rest,) = made.complete(batch)
    assert [run.group for run in rest.blocks] == [2, 3]


# Where the cuts are


def layout_of(*layers: tuple[int, ...]) -> KVLayout:
    return KVLayout(
        groups=tuple(KVGroup(layers=each) for each in layers),
        block_size=16,
        num_kv_heads=1,
        head_dim=4,
        dtype="float32",
    )


INTERLEAVED = ((0, 2, 4, 6), (1, 3, 5, 7))
IN_TURN = ((0, 1), (2, 3), (4, 5), (6, 7))
FIVE_TO_ONE = ((0, 1), (2, 3), (4, 6), (7, 8), (9, 10), (5, 11))


def test_groups_that_grow_together_are_cut_by_layers() -> None:
    plan = CutPlan.of(layout_of(*INTERLEAVED), 2)
    assert plan.marks == (3,)
    assert plan.cuts == (Cut((0, 1), 0, 1), Cut((0, 1), 2, 3))
    assert CutPlan.of(layout_of(*INTERLEAVED), 4).marks == (1, 3, 5)


def test_groups_that_are_complete_one_after_another_are_cut_by_groups() -> None:
    plan = CutPlan.of(layout_of(*IN_TURN), 2)
    assert plan.marks == (3,)
    assert plan.cuts == (Cut((0, 1), 0, 1), Cut((2, 3), 0, 1))
    plan = CutPlan.of(layout_of(*FIVE_TO_ONE), 3)
    assert plan.marks == (3, 6)
    assert [cut.groups for cut in plan.cuts] == [(0, 1), (2,), (3, 4, 5)]


def layouts() -> st.SearchStrategy[KVLayout]:
    """Layouts whose groups take a model's layers in any order."""
    shapes = st.tuples(st.integers(1, 6), st.integers(1, 6))

    def dealt(shape: tuple[int, int]) -> st.SearchStrategy[KVLayout]:
        num_groups, num_layers = shape
        return st.permutations(range(num_groups * num_layers)).map(
            lambda order: layout_of(
                *(
                    tuple(sorted(order[at : at + num_layers]))
                    for at in range(0, len(order), num_layers)
                )
            )
        )

    return shapes.flatmap(dealt)


@settings(max_examples=200, deadline=None)
@given(layout=layouts(), num_cuts=st.integers(1, 9))
def test_b12_c24_cuts_have_everything_once_and_only_what_is_complete(
    layout: KVLayout, num_cuts: int
) -> None:
    plan = CutPlan.of(layout, num_cuts)
    assert len(plan.marks) == len(plan.cuts) - 1 < num_cuts
    assert list(plan.marks) == sorted(set(plan.marks))
    parts = [
        (group, layer)
        for cut in plan.cuts
        for group in cut.groups
        for layer in range(cut.first_layer, cut.last_layer + 1)
    ]
    assert sorted(parts) == list(
        itertools.product(range(len(layout.groups)), range(layout.layers_per_group))
    )
    for mark, cut in zip(plan.marks, plan.cuts, strict=False):
        for group in cut.groups:
            layers = layout.groups[group].layers[cut.first_layer : cut.last_layer + 1]
            assert max(layers) <= mark, "offered before it is computed"


@pytest.mark.parametrize("num_layers", [1, 2, 5, 30])
@pytest.mark.parametrize("num_ranges", [1, 2, 3, 4, 7, 64])
def test_c24_ranges_cover_every_layer_once(num_layers: int, num_ranges: int) -> None:
    made = Bench(4, num_layers=num_layers, layer_ranges=num_ranges)
    made.add("R", 20)
    offers = made.run()
    layers = [range(offer.first_layer, offer.last_layer + 1) for offer in offers]
    assert list(itertools.chain(*layers)) == list(range(num_layers))
    assert len(offers) == min(num_layers, num_ranges)
