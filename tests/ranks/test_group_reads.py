"""A read counts once every rank has read its part, and fails if one rank's part fails.

If it counted earlier, a step would compute on heads that are not here yet; if a rank that reports
twice stood in for another, the same. And blocks must not be free while any rank's NIC may write.
"""

import asyncio
import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InternalError
from core.ids import Attempt, Incarnation, OperationId, RequestId, WorkerId
from core.messages import GroupBlocks, PieceId, Welcome
from ranks import group_reads
from ranks.group_reads import GroupReads
from ranks.messages import Command, Connect, Post, TearDown, WarmUp
from transfer.actions import PostRead
from transfer.reads import ReadEnd

SOURCE, OTHER_SOURCE = Incarnation("a1"), Incarnation("b2")
WELCOME = Welcome(worker_id=WorkerId("prefill-0"), incarnation=SOURCE)


def post_of(operation: int, source: Incarnation = SOURCE) -> PostRead:
    blocks = (GroupBlocks(group=0, first_index=0, block_ids=(), generations=()),)
    return PostRead(
        operation=OperationId(operation),
        peer=source,
        owner=(RequestId("r"), Attempt(1)),
        piece=PieceId(first_layer=0, last_layer=0, chunk=0),
        source=blocks,
        target=blocks,
        first_token=0,
        end_token=16,
    )


@dataclass
class ScriptedReads:
    """The leader's own reads, ended by the test."""

    posted: list[OperationId] = field(default_factory=list)
    connected: list[Incarnation] = field(default_factory=list)
    torn: list[Incarnation] = field(default_factory=list)
    cancelled: list[OperationId] = field(default_factory=list)
    warmed: list[tuple[OperationId, Incarnation]] = field(default_factory=list)
    is_closed: bool = False
    refusal: Exception | None = None
    transport: str = "scripted"

    def connect(self, source: Incarnation, welcome: Welcome) -> None:
        del welcome
        if self.refusal is not None:
            raise self.refusal
        self.connected.append(source)

    def post(self, read: PostRead) -> None:
        self.posted.append(read.operation)

    def warm_up(self, operation: OperationId, source: Incarnation) -> None:
        self.warmed.append((operation, source))

    def cancel(self, operation: OperationId) -> None:
        self.cancelled.append(operation)

    def tear_down(self, source: Incarnation, reason: str) -> None:
        del reason
        self.torn.append(source)

    async def drain(self, *, timeout_s: float) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        self.is_closed = True


@dataclass
class ScriptedRanks:
    """Followers that the test answers for."""

    ranks: tuple[int, ...]
    commands: list[Command] = field(default_factory=list)
    is_killed: bool = False

    def send(self, command: Command) -> None:
        self.commands.append(command)

    def kill(self) -> None:
        self.is_killed = True


class World:
    """Reads of ``num_ranks`` ranks, and what they told."""

    def __init__(self, num_ranks: int) -> None:
        self.own = ScriptedReads()
        self.others = ScriptedRanks(tuple(range(1, num_ranks)))
        self.ends: list[ReadEnd] = []
        self.reads = GroupReads(lambda _: self.own, self.others, self.ends.append)

    def end(self, rank: int, operation: int, failure: str | None = None) -> None:
        self.reads.ended(rank, ReadEnd(OperationId(operation), SOURCE, failure, nbytes=100))


@pytest.fixture
async def two_ranks() -> World:
    return World(2)


async def test_every_rank_is_told_what_to_read(two_ranks: World) -> None:
    two_ranks.reads.connect(SOURCE, WELCOME)
    two_ranks.reads.post(post_of(1))
    two_ranks.reads.tear_down(SOURCE, "gone")
    assert two_ranks.own.connected == [SOURCE]
    assert two_ranks.own.posted == [1]
    assert two_ranks.own.torn == [SOURCE]
    assert two_ranks.others.commands == [
        Connect(SOURCE, WELCOME),
        Post(post_of(1)),
        TearDown(SOURCE, "gone"),
    ]


async def test_a_source_that_the_leader_cannot_pair_with_is_told_to_nobody(
    two_ranks: World,
) -> None:
    two_ranks.own.refusal = InternalError("no")
    with pytest.raises(InternalError):
        two_ranks.reads.connect(SOURCE, WELCOME)
    assert not two_ranks.others.commands


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_c24_a_read_has_landed_when_every_rank_has_its_part(order: tuple[int, ...]) -> None:
    world = World(3)
    world.reads.post(post_of(1))
    for rank in order[:-1]:
        world.end(rank, 1)
        assert not world.ends
    world.end(order[-1], 1)
    assert world.ends == [ReadEnd(OperationId(1), SOURCE, nbytes=300)]


async def test_c24_i02_a_rank_that_ends_twice_does_not_stand_in_for_another() -> None:
    world = World(3)
    world.reads.post(post_of(1))
    for _ in range(3):
        world.end(1, 1)
    assert not world.ends
    world.end(0, 1)
    world.end(2, 1)
    assert [end.failure for end in world.ends] == [None]


class _Count(set[int]):
    """What a counter of ranks would be: any report takes one off."""

    def __contains__(self, rank: object) -> bool:
        return bool(len(self))

    def remove(self, rank: int) -> None:
        del rank
        self.pop()


async def test_c24_mutation_counting_ranks_ends_a_read_too_early() -> None:
    world = World(3)
    world.reads.post(post_of(1))
    (read,) = world.reads._outstanding.values()
    read.waiting_for = _Count(read.waiting_for)
    for _ in range(3):
        world.end(1, 1)
    assert world.ends, "the test above would not notice"


@pytest.mark.parametrize("failed", [0, 1])
async def test_c08_one_rank_that_fails_fails_the_read_when_all_ranks_have_ended(
    two_ranks: World, failed: int
) -> None:
    """Not before: the other rank's NIC may still write."""
    two_ranks.reads.post(post_of(1))
    two_ranks.end(failed, 1, "endpoint lost")
    assert not two_ranks.ends
    two_ranks.end(1 - failed, 1)
    (end,) = two_ranks.ends
    assert end.failure == f"rank {failed}: endpoint lost"


async def test_c08_a_failed_part_ends_the_others_parts_soon(two_ranks: World) -> None:
    two_ranks.reads.post(post_of(1))
    two_ranks.end(1, 1, "endpoint lost")
    assert two_ranks.own.torn == [SOURCE]
    assert isinstance(two_ranks.others.commands[-1], TearDown)
    # Its own end is a failure, too, and changes nothing: the first one is told.
    two_ranks.end(0, 1, "torn down")
    assert [end.failure for end in two_ranks.ends] == ["rank 1: endpoint lost"]


async def test_an_end_that_nobody_waits_for_is_dropped(two_ranks: World) -> None:
    two_ranks.end(1, 7)
    assert not two_ranks.ends


async def test_closing_ends_the_followers_which_proves_the_end_of_their_reads(
    two_ranks: World,
) -> None:
    two_ranks.reads.post(post_of(1))
    two_ranks.reads.close()
    assert two_ranks.own.is_closed
    assert two_ranks.others.is_killed
    two_ranks.end(0, 1)
    two_ranks.end(1, 1)
    assert not two_ranks.ends


async def test_a_drain_waits_for_all_ranks_and_not_for_ever(two_ranks: World) -> None:
    two_ranks.reads.post(post_of(1))
    two_ranks.end(0, 1)
    assert not await two_ranks.reads.drain(timeout_s=0.01)
    draining = asyncio.create_task(two_ranks.reads.drain(timeout_s=30))
    await asyncio.sleep(0)
    two_ranks.end(1, 1)
    assert await draining
    assert await two_ranks.reads.drain(timeout_s=0)


async def test_a_drain_takes_no_more_reads_and_each_of_them_ends_once(two_ranks: World) -> None:
    two_ranks.reads.post(post_of(1))
    assert not await two_ranks.reads.drain(timeout_s=0)
    two_ranks.reads.post(post_of(2))
    two_ranks.reads.warm_up(OperationId(3), SOURCE)
    assert two_ranks.ends == [], "never from within a call"
    await asyncio.sleep(0)
    assert [end.operation for end in two_ranks.ends] == [2, 3]
    assert {end.failure for end in two_ranks.ends} == {"this worker is ending"}
    assert two_ranks.own.posted == [1]
    assert two_ranks.others.commands == [Post(post_of(1))]


async def test_a_drain_takes_back_nothing_that_somebody_waits_for(two_ranks: World) -> None:
    """Its owner cancels first: the end of a read taken back is no outcome for who waits for it."""
    two_ranks.reads.post(post_of(1))
    assert not await two_ranks.reads.drain(timeout_s=0)
    assert two_ranks.own.cancelled == []


async def test_a_rank_that_does_not_prove_the_end_of_its_reads_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frozen follower would hold its blocks for ever."""
    monkeypatch.setattr(group_reads, "ANSWER_TIMEOUT_S", 0.01)
    raised: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: raised.set_result(context["exception"])
    )
    world = World(3)
    world.reads.post(post_of(1))
    world.reads.tear_down(SOURCE, "gone")
    world.end(0, 1, "torn down")
    world.end(1, 1, "torn down")
    with pytest.raises(InternalError, match=r"ranks \[2\] of this worker did not end"):
        raise await asyncio.wait_for(raised, 30)


async def test_reads_that_ended_in_time_and_later_ones_are_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_reads, "ANSWER_TIMEOUT_S", 0.0)
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    world = World(2)
    world.reads.post(post_of(1))
    world.reads.tear_down(SOURCE, "gone")
    world.end(0, 1, "torn down")
    world.end(1, 1, "torn down")
    world.reads.post(post_of(2))  # after the tear-down: not one of those that it ends
    await asyncio.sleep(0.01)
    assert not errors


@given(data=st.data())
def test_c08_c24_each_read_ends_once_and_alike_in_any_order(data: st.DataObject) -> None:
    asyncio.run(_any_order(data))


async def _any_order(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    num_reads = data.draw(st.integers(1, 4))
    world = World(num_ranks)
    for operation in range(num_reads):
        world.reads.post(post_of(operation))
    parts = [(rank, operation) for rank in range(num_ranks) for operation in range(num_reads)]
    failed = {part for part in parts if data.draw(st.integers(0, 3)) == 0}
    seen: set[tuple[int, int]] = set()
    repeated = data.draw(st.lists(st.sampled_from(parts), max_size=6))
    for rank, operation in data.draw(st.permutations(parts + repeated)):
        world.end(rank, operation, "lost" if (rank, operation) in failed else None)
        seen.add((rank, operation))
        ended = {end.operation for end in world.ends}
        whole = {op for op in range(num_reads) if all((r, op) in seen for r in range(num_ranks))}
        assert ended == whole
    assert len(world.ends) == num_reads
    for end in world.ends:
        has_failed = any((rank, end.operation) in failed for rank in range(num_ranks))
        assert (end.failure is not None) == has_failed


async def test_every_rank_warms_its_own_pair_up_and_that_ends_once(two_ranks: World) -> None:
    two_ranks.reads.warm_up(OperationId(1), SOURCE)
    assert two_ranks.own.warmed == [(OperationId(1), SOURCE)]
    assert two_ranks.others.commands == [WarmUp(OperationId(1), SOURCE)]
    two_ranks.end(0, 1)
    assert two_ranks.ends == []
    two_ranks.end(1, 1)
    assert [end.failure for end in two_ranks.ends] == [None]


def num_torn(world: World) -> int:
    return sum(isinstance(command, TearDown) for command in world.others.commands)


async def test_a_late_failure_of_a_torn_down_read_leaves_the_new_pair_alone() -> None:
    """The source may be paired anew before every rank has told what became of the old pair."""
    world = World(3)
    world.reads.connect(SOURCE, WELCOME)
    world.reads.post(post_of(1))
    # Given a read of which the leader's part has landed, when its source is torn down
    world.end(0, 1)
    world.reads.tear_down(SOURCE, "channel lost")
    # And the source is paired anew
    world.reads.connect(SOURCE, WELCOME)
    world.reads.post(post_of(2))
    # When the others tell the end of the first read
    world.end(1, 1, "torn down")
    world.end(2, 1, "torn down")
    # Then that one has failed, and the new pair goes on
    assert [end.operation for end in world.ends if end.failure is not None] == [1]
    assert num_torn(world) == len(world.own.torn) == 1
    for rank in range(3):
        world.end(rank, 2)
    assert [end.operation for end in world.ends] == [1, 2]
    assert world.ends[1].failure is None


async def test_a_failure_over_the_new_pair_tears_it_down() -> None:
    world = World(3)
    world.reads.connect(SOURCE, WELCOME)
    world.reads.post(post_of(1))
    world.reads.tear_down(SOURCE, "channel lost")
    world.reads.connect(SOURCE, WELCOME)
    world.reads.post(post_of(2))
    world.end(1, 2, "connection reset")
    assert num_torn(world) == 2
