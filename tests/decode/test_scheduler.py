"""A sequence may end, or lose its blocks, while the device still runs its steps.

The scheduler runs ahead of the device by design. If a block came back too early, a late step would
write into the next owner's KV; if an ended sequence were scheduled once more, its client would see
tokens after the end. The device here is the test: a step completes when the test says so.
"""

from collections.abc import Callable, Iterator

import pytest

from blockmgr.receive_target import ReceiveTarget
from core.errors import RequestError
from core.ids import Attempt, OperationId, RequestId
from core.sampling import SamplingParams
from decode.sequence import Sequence
from decode.state import State
from tests.decode.bench import STOP, Bench


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Makes benches, and checks the invariants of each at the end."""
    benches: list[Bench] = []

    def make(num_blocks: int, *, prefix_caching: bool = False, **config: int) -> Bench:
        benches.append(Bench(num_blocks, prefix_caching=prefix_caching, **config))
        return benches[-1]

    yield make
    for made in benches:
        made.scheduler.check_invariants()


def test_a01_stop_while_the_next_step_is_in_flight(bench: Callable[..., Bench]) -> None:
    # Given R with a prefill step and a decode step in flight
    b = bench(10)
    sequence = b.add("R", 33)
    s1, s2 = b.step(), b.step()
    # When the first yields a stop token
    (progress,) = b.complete(s1, STOP)
    # Then R is gone at once, its blocks only after the second
    assert progress.finish_reason == "stop"
    assert sequence.state is State.GONE
    assert b.num_free == 7
    assert b.complete(s2) == []
    assert b.num_free == 10


def test_a02_nothing_in_flight_frees_at_once(bench: Callable[..., Bench]) -> None:
    b = bench(10)
    b.add("R", 33)
    b.complete(b.step(), STOP)
    assert b.num_free == 10


def test_a03_three_steps_in_flight(bench: Callable[..., Bench]) -> None:
    b = bench(10)
    sequence = b.add("R", 33)
    steps = [b.step(), b.step(), b.step()]
    b.scheduler.abort(sequence.owner)
    for step in steps[:2]:
        b.complete(step)
        assert b.num_free == 7
    b.complete(steps[2])
    assert b.num_free == 10


def test_a04_abort_of_a_partial_prefill(bench: Callable[..., Bench]) -> None:
    b = bench(10, max_batch_tokens=16)
    sequence = b.add("R", 33)
    s1 = b.step()
    b.scheduler.abort(sequence.owner)
    assert b.num_free == 7
    b.complete(s1)
    assert b.num_free == 10


def test_a05_length_finish_is_never_over_scheduled(bench: Callable[..., Bench]) -> None:
    b = bench(10)
    b.add("SHORT", 16, max_tokens=1)
    long = b.add("LONG", 16)
    s1, s2 = b.step(), b.step()
    assert len(s2.sequences) == 1
    progress = b.complete(s1)
    assert [p.finish_reason for p in progress] == ["length", None]
    assert b.num_free == 8  # SHORT's block is back while s2 is in flight
    b.complete(s2)
    b.scheduler.abort(long.owner)


def test_a08_abort_before_allocation(bench: Callable[..., Bench]) -> None:
    b = bench(10)
    sequence = b.add("R", 33)
    assert not b.scheduler.abort(sequence.owner)
    assert not b.scheduler.abort(sequence.owner)
    assert b.num_free == 10
    assert b.scheduler.schedule() is None


def test_a09_several_sequences_one_fence(bench: Callable[..., Bench]) -> None:
    b = bench(10)
    b.add("A", 16)
    b.add("B", 16)
    s1, s2 = b.step(), b.step()
    b.complete(s1, STOP)
    assert b.num_free == 6
    b.complete(s2)
    assert b.num_free == 10


def fill_with_two(b: Bench) -> tuple[Sequence, Sequence]:
    """Two received sequences whose next-but-one token needs a block, in a pool without one."""
    pair = (
        b.add("old", 31, remote=True, max_tokens=20),
        b.add("young", 31, remote=True, max_tokens=20),
    )
    for index, sequence in enumerate(pair):
        assert b.scheduler.receive(sequence.owner, [ReceiveTarget(0, 0, 2)], OperationId(index))
        b.blocks.end_operation(OperationId(index))
    for sequence in pair:
        b.scheduler.deliver(sequence.owner, 5)
    return pair


def test_a15_no_preemption_without_progress(bench: Callable[..., Bench]) -> None:
    # Given a full pool, and a step in flight for every candidate
    b = bench(4, reserve_blocks_min=0)
    old, young = fill_with_two(b)
    s1 = b.step()
    # When old needs a third block
    s2 = b.scheduler.schedule()
    # Then nobody changes, since young's blocks would only be fenced
    assert s2 is None
    assert (old.state, young.state) == (State.RUNNING, State.RUNNING)
    assert b.scheduler.num_preemptions == 0
    # And after the completion one victim suffices
    b.complete(s1)
    s2 = b.step()
    assert b.scheduler.num_preemptions == 1
    assert young.state is State.WAITING
    assert [s.slot for s in s2.sequences] == [old.slot]
    b.complete(s2)


def test_a10_preempted_sequence_comes_back_with_what_it_knew(bench: Callable[..., Bench]) -> None:
    b = bench(4, reserve_blocks_min=0)
    old, young = fill_with_two(b)
    b.complete(b.step())
    b.complete(b.step())
    assert young.state is State.WAITING
    b.scheduler.abort(old.owner)
    again = b.step()
    assert [s.num_tokens for s in again.sequences] == [33]
    assert again.openings[0].output_token_ids == (5, 7)
    b.complete(again)
    assert young.output_token_ids == [5, 7, 7]


def test_c19_received_sequence_passes_a_waiting_one_that_does_not_fit(
    bench: Callable[..., Bench],
) -> None:
    b = bench(6)
    remote = b.add("remote", 31, remote=True, max_tokens=20)
    assert b.scheduler.receive(remote.owner, [ReceiveTarget(0, 0, 2)], OperationId(1))
    big = b.add("big", 95, max_tokens=1)
    b.blocks.end_operation(OperationId(1))
    b.scheduler.deliver(remote.owner, 5)
    step = b.step()
    assert big.state is State.WAITING
    assert [s.token_ids for s in step.sequences] == [(5,)]
    b.complete(step)


def test_c17_half_received_sequences_never_wait_for_each_other(bench: Callable[..., Bench]) -> None:
    # Given a pool that holds one of two prompts, whose tickets come in turn
    b = bench(5)
    first = b.add("first", 64, remote=True, max_tokens=2)
    second = b.add("second", 64, remote=True, max_tokens=2)
    assert b.scheduler.receive(first.owner, [ReceiveTarget(0, 0, 2)], OperationId(1))
    # Then the second gets nothing until the first has all
    assert b.scheduler.receive(second.owner, [ReceiveTarget(0, 0, 2)], OperationId(2)) is None
    assert b.scheduler.receive(first.owner, [ReceiveTarget(0, 2, 2)], OperationId(3))
    b.blocks.end_operation(OperationId(1))
    b.blocks.end_operation(OperationId(3))
    b.scheduler.deliver(first.owner, 5)
    b.complete(b.step())
    assert b.scheduler.receive(second.owner, [ReceiveTarget(0, 0, 2)], OperationId(2))
    b.blocks.end_operation(OperationId(2))


def test_delivered_sequences_that_fill_the_pool_still_run(bench: Callable[..., Bench]) -> None:
    # Given two received sequences that leave no block for a first decode token
    b = bench(4, reserve_blocks_min=0)
    sequences = [b.add(name, 32, remote=True, max_tokens=3) for name in ("A", "B")]
    for index, sequence in enumerate(sequences):
        operation = OperationId(index)
        assert b.scheduler.receive(sequence.owner, [ReceiveTarget(0, 0, 2)], operation)
        b.blocks.end_operation(operation)
    for sequence in sequences:
        b.scheduler.deliver(sequence.owner, 5)
    # Then one gives way and both end
    for _ in range(20):
        if (batch := b.scheduler.schedule()) is None:
            break
        b.complete(batch)
    assert [s.output_token_ids for s in sequences] == [[5, 7, 7], [5, 7, 7]]
    assert b.num_free == 4


def test_request_larger_than_the_pool_is_refused_with_the_fix(bench: Callable[..., Bench]) -> None:
    b = bench(4)
    with pytest.raises(RequestError, match="lower max_tokens"):
        b.add("huge", 60, max_tokens=10)
    assert b.scheduler.num_waiting == 0


def test_overlapped_decode_takes_its_token_from_the_slot(bench: Callable[..., Bench]) -> None:
    b = bench(10, max_batch_tokens=20)
    b.add("R", 33)
    s1, s2, s3 = b.step(), b.step(), b.step()
    assert [s.sequences[0].num_tokens for s in (s1, s2, s3)] == [20, 13, 1]
    assert [s.sequences[0].sample for s in (s1, s2, s3)] == [False, True, True]
    assert s3.sequences[0].token_ids is None
    assert s3.sequences[0].position == 33
    for step in (s1, s2, s3):
        b.complete(step)


def cache_prompt(b: Bench, num_tokens: int) -> None:
    """Leave the KV of a prompt in the prefix cache."""
    b.add("earlier", num_tokens, max_tokens=1)
    b.complete(b.step())


def test_sequences_share_a_prefix_instead_of_paying_for_it_again(
    bench: Callable[..., Bench],
) -> None:
    # Given a prefix of 10 blocks, and five prompts that begin with it
    b = bench(20, prefix_caching=True)
    cache_prompt(b, 160)
    for n in range(5):
        b.add(f"R{n}", 161, max_tokens=10)
    # Then all of them run: each needs one block of its own
    step = b.step()
    assert len(step.sequences) == 5
    b.complete(step)


def test_c17_pinned_prefix_and_preempted_sequence_do_not_wait_for_each_other(
    bench: Callable[..., Bench],
) -> None:
    # Given a remote sequence that has pinned half of the pool
    b = bench(20, prefix_caching=True)
    cache_prompt(b, 160)
    remote = b.add("remote", 200, remote=True, max_tokens=2)
    assert remote.num_computed == 160
    # And a local one that outgrows the rest and gives way
    local = b.add("local", 80, max_tokens=200, first=1000)
    for _ in range(200):
        if (batch := b.scheduler.schedule()) is None:
            break
        b.complete(batch)
    assert local.state is State.WAITING
    # Then the remote one gets what it was promised, and after it the local one goes on
    assert b.scheduler.receive(remote.owner, [ReceiveTarget(0, 10, 3)], OperationId(1))
    b.blocks.end_operation(OperationId(1))
    b.scheduler.deliver(remote.owner, 5)
    for _ in range(400):
        if (batch := b.scheduler.schedule()) is None:
            break
        b.complete(batch)
    assert (remote.state, local.state) == (State.GONE, State.GONE)


def test_prefix_is_not_pinned_where_the_rest_cannot_be_promised(
    bench: Callable[..., Bench],
) -> None:
    b = bench(20, prefix_caching=True)
    cache_prompt(b, 160)
    running = b.add("running", 150, max_tokens=20, first=1000)
    b.complete(b.step())
    remote = b.add("remote", 250, remote=True, max_tokens=2)
    assert remote.num_computed == 0
    b.scheduler.abort(running.owner)
    b.scheduler.abort(remote.owner)


def test_newcomer_does_not_pass_a_ticket_that_waits_for_memory(
    bench: Callable[..., Bench],
) -> None:
    b = bench(10)
    running = b.add("running", 80, max_tokens=20)
    b.complete(b.step())
    big = b.add("big", 100, remote=True, max_tokens=2)
    assert b.scheduler.receive(big.owner, [ReceiveTarget(0, 0, 7)], OperationId(1)) is None
    newcomer = b.add("newcomer", 10, max_tokens=2)
    b.complete(b.step())
    assert newcomer.state is State.WAITING
    b.scheduler.abort(running.owner)
    assert b.scheduler.receive(big.owner, [ReceiveTarget(0, 0, 7)], OperationId(1))
    b.complete(b.step())
    assert newcomer.state is State.RUNNING
    b.blocks.end_operation(OperationId(1))


def test_empty_prompt_is_refused(bench: Callable[..., Bench]) -> None:
    with pytest.raises(RequestError, match="empty"):
        bench(10).add("R", 0)


def test_c17_prefix_is_not_pinned_behind_a_remote_sequence_without_a_promise(
    bench: Callable[..., Bench],
) -> None:
    # Prefill works in order: the pin would outlast the older one, which may need this memory.
    b = bench(24, prefix_caching=True)
    cache_prompt(b, 112)
    older = b.add("older", 245, remote=True, max_tokens=4, first=1000)
    younger = b.add("younger", 240, remote=True, max_tokens=4)
    assert younger.num_computed == 0
    assert b.scheduler.receive(older.owner, [ReceiveTarget(0, 0, 16)], OperationId(1))
    b.blocks.end_operation(OperationId(1))
    b.scheduler.abort(older.owner)
    b.scheduler.abort(younger.owner)


def test_output_that_is_complete_already_is_refused(bench: Callable[..., Bench]) -> None:
    b = bench(10)
    done = Sequence(
        owner=(RequestId("R"), Attempt(2)),
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(seed=1, max_tokens=2),
        output_token_ids=[3, 4],
    )
    with pytest.raises(RequestError, match="there already"):
        b.scheduler.add(done, remote=False)
