"""A sequence with windows is promised what its tickets name, and not what they leave out.

Promised too much, memory that windows let go would not become more sequences; promised too little,
two half-received sequences could wait for each other's blocks. So it is with a prompt that is
computed here, chunk by chunk.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockmgr.receive_target import ReceiveTarget
from core.ids import OperationId
from core.kv_layout import KVGroup, KVLayout
from decode.state import State
from tests.decode.bench import Bench

LAYOUT = KVLayout(
    groups=(
        KVGroup(layers=(0,), window=32, num_sinks=10, heads=(0,)),
        KVGroup(layers=(0,), heads=(1,)),
    ),
    block_size=16,
    num_kv_heads=2,
    head_dim=4,
    dtype="float32",
)
TICKETS = (ReceiveTarget(0, 0, 1), ReceiveTarget(0, 8, 2), ReceiveTarget(1, 0, 10))
"""Of 160 tokens: the sinks, the window from token 129 on, and all for the other head."""


def test_as_many_are_received_as_their_windows_have_room_for() -> None:
    # Given a pool for 26 blocks beside the reserve for growth of one sequence
    bench = Bench(28, layout=LAYOUT)
    first, second, third = (bench.add(name, 160, remote=True, max_tokens=9) for name in "ABC")

    # When two receive their first ticket, then all is promised
    for at, sequence in enumerate((first, second)):
        assert bench.scheduler.receive(sequence.owner, TICKETS[:1], OperationId(at)) is not None
    assert bench.scheduler.receive(third.owner, TICKETS[:1], OperationId(9)) is None
    assert [first.promised_blocks, second.promised_blocks] == [12, 12]

    # Then each gets the rest of its own
    for at, sequence in enumerate((first, second)):
        landed = bench.scheduler.receive(sequence.owner, TICKETS[1:], OperationId(2 + at))
        assert landed is not None
        assert sequence.promised_blocks == 0
    for operation in range(4):
        bench.blocks.end_operation(OperationId(operation))
    for sequence in (first, second):
        bench.scheduler.deliver(sequence.owner, 7)
    while (batch := bench.scheduler.schedule()) is not None:
        bench.complete(batch)
    assert bench.scheduler.receive(third.owner, TICKETS[:1], OperationId(9)) is not None
    bench.scheduler.abort(third.owner)
    bench.blocks.end_operation(OperationId(9))
    bench.scheduler.check_invariants()
    assert bench.num_free == 28


def test_behind_a_pinned_prefix_just_the_rest_is_promised() -> None:
    bench = Bench(60, prefix_caching=True, layout=LAYOUT)
    local = bench.add("local", 80, max_tokens=1)
    while (batch := bench.scheduler.schedule()) is not None:
        bench.complete(batch)

    remote = bench.add("remote", 160, remote=True)

    assert remote.num_computed == 80
    assert remote.promised_blocks == 2 + 5
    assert not bench.blocks.holds(local.owner)
    bench.scheduler.abort(remote.owner)


def run_out(bench: Bench, *, limit: int = 2000) -> list[int]:
    """Run steps, two in flight, until nothing is left; return the sequences of each."""
    sizes: list[int] = []
    batch = bench.scheduler.schedule()
    for _ in range(limit):
        if batch is None:
            return sizes
        sizes.append(len(batch.sequences))
        following = bench.scheduler.schedule()
        bench.complete(batch)
        bench.scheduler.check_invariants()
        batch = following or bench.scheduler.schedule()
    pytest.fail(f"still running after {limit} steps")


def test_prompt_takes_room_chunk_by_chunk_and_is_promised_what_its_windows_leave() -> None:
    bench = Bench(40, layout=LAYOUT, max_batch_tokens=16, reserve_blocks_min=0)
    sequence = bench.add("long", 300, max_tokens=2)

    # When its first chunk of 19 is in a step
    first = bench.step()

    # Then the full head is promised 18 more blocks, the other one a window and two chunks
    assert bench.num_free == 40 - 2
    assert sequence.promised_blocks == 18 + 5
    bench.complete(first)
    run_out(bench)
    assert bench.scheduler.num_preemptions == 0
    assert bench.num_free == 40


def test_prompts_in_computation_never_take_what_another_was_promised() -> None:
    # Given two prompts whose blocks fit, but not while both are being computed
    bench = Bench(40, layout=LAYOUT, max_batch_tokens=32, reserve_blocks_min=0)
    first, second = (
        bench.add(name, 200, max_tokens=2, first=at * 1000) for at, name in enumerate("AB")
    )

    batch = bench.step()
    assert (first.state, second.state) == (State.RUNNING, State.WAITING)
    bench.complete(batch)
    run_out(bench)

    assert bench.scheduler.num_preemptions == 0
    assert (first.state, second.state) == (State.GONE, State.GONE)


def test_pool_that_holds_a_sequence_without_windows_takes_it_in_any_chunks() -> None:
    for max_batch_tokens in (1, 7, 16, 33, 100, 512):
        bench = Bench(2 * 12, layout=LAYOUT, max_batch_tokens=max_batch_tokens)
        sequence = bench.add("whole", 180, max_tokens=12)
        run_out(bench)
        assert sequence.state is State.GONE


def test_preempted_prompt_leaves_no_promise_behind() -> None:
    bench = Bench(44, layout=LAYOUT, max_batch_tokens=32, reserve_blocks_min=0)
    made = [bench.add(f"R{at}", 40, max_tokens=120, first=1000 * at) for at in range(8)]

    run_out(bench)

    assert bench.scheduler.num_preemptions > 0
    assert {sequence.state for sequence in made} == {State.GONE}
    assert bench.num_free == bench.blocks.num_blocks


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 230), min_size=1, max_size=7),
    num_blocks=st.integers(34, 90),
    max_batch_tokens=st.sampled_from([5, 16, 48, 200]),
    shares=st.booleans(),
)
def test_every_mix_of_prompts_comes_to_its_end(
    prompts: list[int], num_blocks: int, max_batch_tokens: int, *, shares: bool
) -> None:
    bench = Bench(
        num_blocks, prefix_caching=shares, layout=LAYOUT, max_batch_tokens=max_batch_tokens
    )
    made = [
        bench.add(f"R{at}", length, max_tokens=20, first=0 if shares else 1000 * at)
        for at, length in enumerate(prompts)
    ]

    run_out(bench)

    assert {sequence.state for sequence in made} == {State.GONE}
    assert bench.blocks.num_allocatable == num_blocks


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_whoever_holds_a_block_is_not_preempted_for_a_prompt_in_chunks(depth: int) -> None:
    # Given a long prompt in its first chunk, and all the room beside its promise full of received
    # sequences: what its windows leave behind is fenced by the steps in flight
    bench = Bench(
        264,
        layout=LAYOUT,
        max_batch_tokens=250,
        max_num_seqs=256,
        reserve_blocks_min=0,
        reserve_blocks_initial=0,
        overlap_depth=depth,
    )
    bench.add("long", 2048, max_tokens=1)
    in_flight = [bench.step()]
    count = 0
    while bench.scheduler._remote._available() >= 2:
        remote = bench.add(f"R{count}", 15, remote=True, max_tokens=2, first=10**6 + 1000 * count)
        targets = [ReceiveTarget(group, 0, 1) for group in (0, 1)]
        assert bench.scheduler.receive(remote.owner, targets, OperationId(count))
        bench.blocks.end_operation(OperationId(count))
        bench.scheduler.deliver(remote.owner, 7)
        count += 1

    # When all run to their end, as many steps in flight as may be
    while in_flight:
        while len(in_flight) < depth and (batch := bench.scheduler.schedule()) is not None:
            in_flight.append(batch)
        bench.complete(in_flight.pop(0))
        if not in_flight and (batch := bench.scheduler.schedule()) is not None:
            in_flight.append(batch)

    assert count > 5
    assert bench.scheduler.num_preemptions == 0
