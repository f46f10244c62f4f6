"""The layers and the ranks of one position come by a read each, into one block.

The second read may write a block that its owner has already: exactly one that the first has begun
to fill. Any other block is shared, or a step's, and a read over it would destroy what is there.
"""

from collections.abc import Callable, Sequence

import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState
from core.errors import InvalidTransitionError, OutOfBlocksError
from core.ids import BlockId, Generation, OperationId, Owner, StepSeq
from core.kv_layout import KVGroup
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import admit_new, ids_of, num_free, owner_of, run_of

READ = OperationId(1)
SECOND = OperationId(2)
WHOLE = [ReceiveTarget(group=0, first_index=0, count=3)]


def test_c25_another_layer_range_lands_in_the_blocks_that_the_first_one_got(
    make_manager: MakeManager,
) -> None:
    blocks = make_manager(4)
    owner = admit_new(blocks, "R", 0)
    first = blocks.begin_receive(owner, WHOLE, READ)
    assert blocks.num_vacant(owner, WHOLE) == 0
    assert blocks.num_vacant(owner, [ReceiveTarget(0, 2, 3)]) == 2

    # When the ticket for other layers of the same positions comes, cut in other runs
    second = blocks.begin_receive(owner, [ReceiveTarget(0, 0, 1), ReceiveTarget(0, 1, 2)], SECOND)

    # Then nothing new was taken, and both reads name the same blocks in the same lives
    assert [pair for part in second for pair in part] == first[0]
    assert num_free(blocks) == 1
    assert blocks.operation_blocks(SECOND) == blocks.operation_blocks(READ) == first[0]


def test_operations_of_one_block_end_each_on_its_own(make_manager: MakeManager) -> None:
    # Given two layer ranges of the same blocks, read by two operations
    blocks = make_manager(4)
    owner = admit_new(blocks, "R", 0)
    blocks.begin_receive(owner, WHOLE, READ)
    blocks.begin_receive(owner, WHOLE, SECOND)

    blocks.end_operation(READ)
    assert blocks.counts()[BlockState.RECEIVING] == 3
    with pytest.raises(InvalidTransitionError):
        blocks.settle(owner, 48)
    blocks.release(owner)
    assert blocks.counts()[BlockState.QUARANTINED] == 3
    blocks.end_operation(SECOND)

    assert num_free(blocks) == 4


def test_c25_a_layer_range_may_come_after_the_first_one_has_landed(
    make_manager: MakeManager,
) -> None:
    blocks = make_manager(4)
    owner = admit_new(blocks, "R", 0)
    first = blocks.begin_receive(owner, WHOLE, READ)
    blocks.end_operation(READ)
    assert blocks.counts()[BlockState.ACTIVE] == 3

    assert blocks.begin_receive(owner, WHOLE, SECOND) == first
    assert blocks.counts()[BlockState.RECEIVING] == 3
    blocks.end_operation(SECOND)
    blocks.settle(owner, 48)


def grown(blocks: BlockManager, owner: Owner) -> None:
    """Its own steps will write this block."""
    blocks.grow(owner, 16)


def received_and_settled(blocks: BlockManager, owner: Owner) -> None:
    """Anyone with the same prefix may share it by now."""
    blocks.begin_receive(owner, [ReceiveTarget(0, 0, 1)], SECOND)
    blocks.end_operation(SECOND)
    blocks.settle(owner, 16)


def received_and_stepped(blocks: BlockManager, owner: Owner) -> None:
    """A step that was dispatched may read and write it."""
    blocks.begin_receive(owner, [ReceiveTarget(0, 0, 1)], SECOND)
    blocks.end_operation(SECOND)
    blocks.dispatch_step([owner])


def received_and_step_is_over(blocks: BlockManager, owner: Owner) -> None:
    """What a step has written there would be lost."""
    received_and_stepped(blocks, owner)
    blocks.complete_step(StepSeq(1))


@pytest.mark.parametrize(
    "prepare", [grown, received_and_settled, received_and_stepped, received_and_step_is_over]
)
def test_c25_a_block_that_is_more_than_a_receive_target_is_not_received_over(
    make_manager: MakeManager, prepare: Callable[[BlockManager, Owner], None]
) -> None:
    blocks = make_manager(4)
    owner = admit_new(blocks, "R", 0, tokens=range(48))
    prepare(blocks, owner)
    before = blocks.counts()

    with pytest.raises(InvalidTransitionError):
        blocks.begin_receive(owner, WHOLE, READ)

    assert blocks.counts() == before
    assert not blocks.operation_blocks(READ)


def test_c25_a_block_of_a_prefix_hit_is_not_received_over(make_manager: MakeManager) -> None:
    # Given R's settled block, which S has pinned to receive what follows
    blocks = make_manager(4)
    owner = admit_new(blocks, "R", 16, tokens=range(16))
    blocks.complete_step(blocks.dispatch_step([owner]))
    blocks.settle(owner, 16)
    sharer = owner_of("S")
    blocks.admit(sharer, tokens=run_of(range(48)), num_cached_tokens=16, num_tokens=16)

    with pytest.raises(InvalidTransitionError):
        blocks.begin_receive(sharer, WHOLE, READ)

    blocks.begin_receive(sharer, [ReceiveTarget(0, 1, 2)], READ)
    blocks.begin_receive(sharer, [ReceiveTarget(0, 1, 2)], SECOND)
    for operation in (READ, SECOND):
        blocks.end_operation(operation)


def test_c25_another_life_of_the_owner_joins_no_receive_of_the_one_before(
    make_manager: MakeManager,
) -> None:
    # Given a receive that was rolled back while its first range is still read
    blocks = make_manager(6)
    owner = admit_new(blocks, "R", 0)
    (before,) = blocks.begin_receive(owner, WHOLE, READ)
    blocks.release(owner)
    admit_new(blocks, "R", 0)

    # When it is received again, range by range
    (again,) = blocks.begin_receive(owner, WHOLE, SECOND)

    # Then in blocks that no read of the first life can still write
    assert {at for at, _ in before}.isdisjoint(at for at, _ in again)
    assert blocks.counts()[BlockState.QUARANTINED] == 3
    for operation in (READ, SECOND):
        blocks.end_operation(operation)


def test_i8_joining_a_receive_takes_all_or_nothing(make_manager: MakeManager) -> None:
    # Given two blocks that are received, and too few for what the next range names beside them
    blocks = make_manager(4)
    owner = admit_new(blocks, "R", 0)
    blocks.begin_receive(owner, [ReceiveTarget(0, 0, 2)], READ)
    received = ids_of(blocks, owner)
    blocks.end_operation(READ)

    with pytest.raises(OutOfBlocksError):
        blocks.begin_receive(owner, [ReceiveTarget(0, 0, 5)], SECOND)

    assert blocks.counts()[BlockState.ACTIVE] == 2
    assert num_free(blocks) == 2
    # And with what there is, old and new are named in the order of their positions
    ((*pairs,),) = blocks.begin_receive(owner, [ReceiveTarget(0, 0, 4)], SECOND)
    assert [at for at, _ in pairs] == ids_of(blocks, owner)
    assert ids_of(blocks, owner)[:2] == received
    blocks.end_operation(SECOND)


def test_c25_holes_behind_a_window_are_not_received_again(make_manager: MakeManager) -> None:
    blocks = make_manager(24, KVGroup(layers=(0,)), KVGroup(layers=(1,), window=17))
    owner = admit_new(blocks, "R", 0)
    targets = [ReceiveTarget(0, 0, 4), ReceiveTarget(1, 2, 2)]
    first = blocks.begin_receive(owner, targets, READ)
    assert blocks.begin_receive(owner, targets, SECOND) == first
    for operation in (READ, SECOND):
        blocks.end_operation(operation)
    blocks.settle(owner, 64)
    blocks.complete_step(blocks.dispatch_step([owner]))
    with pytest.raises(InvalidTransitionError):
        blocks.begin_receive(owner, [ReceiveTarget(1, 2, 1)], READ)


# The rule switched off


class JoinsWhateverIsThere(BlockManager):
    """The rule switched off: any block of the owner may be received over."""

    def begin_receive(
        self, owner: Owner, targets: Sequence[ReceiveTarget], operation: OperationId
    ) -> list[list[tuple[BlockId, Generation]]]:
        holding = self._holdings[owner]
        holding.received.update(holding.release_order.tolist())
        return super().begin_receive(owner, targets, operation)


def test_c25_fails_where_a_read_may_fill_what_a_step_writes(make_manager: MakeManager) -> None:
    blocks = make_manager(4, kind=JoinsWhateverIsThere)
    owner = admit_new(blocks, "R", 0)
    received_and_stepped(blocks, owner)

    blocks.begin_receive(owner, [ReceiveTarget(0, 0, 1)], READ)

    assert blocks.is_in_flight(owner), "the step and the read write the same block"
    blocks.end_operation(READ)
