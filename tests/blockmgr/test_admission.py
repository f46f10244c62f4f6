"""A pool must not take in more than what already runs lets it keep.

Where it does, running sequences cannot grow, preempt each other, and the same prompts are computed
again and again; where the rule counts too much, nobody is ever admitted. Numbers only: no block is
known here, so a refusal cannot leave a trace.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockmgr.admission import Admission, GrowthReserve
from tests.blockmgr.words import layout_of, owner_of

A, B = owner_of("A"), owner_of("B")


def fixed(blocks: int) -> GrowthReserve:
    """A reserve that never changes."""
    return GrowthReserve(initial=blocks, minimum=blocks, decay_steps=1)


def test_f01_threshold_is_the_need_and_in_strict_mode_the_reserve_of_all_that_runs() -> None:
    need = layout_of(block_size=64).num_blocks_for(1000)
    assert need == 16
    relaxed, strict = Admission(fixed(0)), Admission(fixed(16))
    speculating = Admission(fixed(16), num_lookahead_blocks=1)

    assert relaxed.threshold(need, num_running=4) == 16
    assert strict.threshold(need, num_running=4) == 80
    assert speculating.threshold(need, num_running=4) == 81


@pytest.mark.parametrize("num_lookahead_blocks", [0, 1])
def test_f02_reserve_of_the_pool_has_no_limit_of_one_sequence(num_lookahead_blocks: int) -> None:
    # Given sequences that can have 32 blocks at most, FastDeploy's cap gave 32 here
    admission = Admission(fixed(16), num_lookahead_blocks=num_lookahead_blocks)

    assert admission.threshold(16, num_running=4) == 80 + num_lookahead_blocks
    assert admission.threshold(32, num_running=100) == 1632 + num_lookahead_blocks


def test_f01_every_group_grows_with_a_sequence() -> None:
    assert Admission(fixed(2), num_groups=3).threshold(6, num_running=5) == 6 + 2 * 3 * 5


def test_f03_free_blocks_below_the_reserve_are_no_room_at_all() -> None:
    assert Admission(fixed(16)).room(20, num_running=4) == -44


def test_f08_reserve_decays_step_by_step_to_its_minimum() -> None:
    reserve = GrowthReserve(initial=4, minimum=1, decay_steps=2)
    reserve.preempted()

    seen = [reserve.blocks]
    for _ in range(20):
        reserve.step()
        seen.append(reserve.blocks)

    assert seen == [4, 4, 3, 3, 2, 2, *[1] * 15]


def test_f08_preemption_resets_the_reserve_and_turns_strict_mode_on() -> None:
    reserve = GrowthReserve(initial=3, minimum=0, decay_steps=1)
    assert not reserve.is_strict
    reserve.preempted()
    assert (reserve.blocks, reserve.is_strict) == (3, True)
    reserve.step()
    reserve.step()
    reserve.preempted()
    assert reserve.blocks == 3
    for _ in range(3):
        assert reserve.is_strict
        reserve.step()
    assert not reserve.is_strict


@settings(max_examples=200, deadline=None)
@given(
    initial=st.integers(0, 8),
    minimum=st.integers(0, 8),
    decay_steps=st.integers(1, 5),
    events=st.lists(st.booleans(), max_size=80),
)
def test_f08_reserve_stays_between_its_limits(
    initial: int, minimum: int, decay_steps: int, events: list[bool]
) -> None:
    reserve = GrowthReserve(initial=initial, minimum=minimum, decay_steps=decay_steps)
    for is_preemption in events:
        before = reserve.blocks
        if is_preemption:
            reserve.preempted()
            assert reserve.blocks == max(initial, minimum)
        else:
            reserve.step()
            assert before - 1 <= reserve.blocks <= before
        assert minimum <= reserve.blocks <= max(initial, minimum)


def test_promise_counts_until_it_is_kept_and_its_owner_will_grow() -> None:
    admission = Admission(fixed(2))
    admission.promise(A, 5)
    assert admission.room(20, num_running=1) == 20 - 5 - 2 * 2
    admission.promise(A, 3)
    assert admission.promised == 3
    admission.promise(A, 0)  # everything is allocated, and A is still to run
    assert admission.room(20, num_running=1) == 20 - 2 * 2
    admission.close(A)
    admission.close(A)
    admission.close(B)
    assert admission.room(20, num_running=1) == 20 - 2
    admission.check_invariants()


def test_c17_lookahead_is_part_of_what_must_fit() -> None:
    # Given 7 blocks, A that needs 4 and B that needs 3, each with one block of lookahead
    admission = Admission(fixed(0), num_lookahead_blocks=1)
    assert admission.room(7, num_running=0) >= 4
    # When A has its 4 and its lookahead
    admission.promise(A, 1)
    # Then B waits, though its 3 blocks are free: with them neither could go on
    assert 7 - 4 >= 3
    assert admission.room(7 - 4, num_running=0) < 3
    # And B fits when A is gone
    admission.close(A)
    assert admission.room(7, num_running=0) >= 3


def test_who_runs_and_was_promised_blocks_grows_once() -> None:
    admission = Admission(GrowthReserve(initial=4, minimum=1, decay_steps=1), num_groups=2)
    admission.promise(owner_of("received"), 3)
    admission.promise(owner_of("chunked"), 5, is_running=True)
    assert admission.threshold(0, num_running=1) == 8 + 2 * 2

    admission.promise(owner_of("chunked"), 2)
    assert admission.threshold(0, num_running=1) == 5 + 2 * 2
    admission.close(owner_of("chunked"))
    assert admission.threshold(0, num_running=1) == 3 + 2 * 2
    admission.check_invariants()
