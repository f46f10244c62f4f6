"""The late end of a torn-down read ends nothing that was begun since.

A source whose channel was lost may be paired anew before every rank has told the end of what was
read over the old pair. A rank's failure is a reason to tear the source down once, for that read: if
each late one tore it down again, it would be the new pair, and everything that is read over it.
"""

from core.ids import OperationId
from ranks.messages import TearDown
from tests.ranks.test_group_reads import SOURCE, WELCOME, World, post_of


def num_torn(world: World) -> int:
    return sum(isinstance(command, TearDown) for command in world.others.commands)


async def test_a_late_failure_of_a_torn_down_read_leaves_the_new_pair_alone() -> None:
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
    assert [end.operation for end in world.ends if end.failure is not None] == [OperationId(1)]
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
