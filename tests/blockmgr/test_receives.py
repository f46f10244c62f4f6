"""A block that a read may still write must not be reused, cleared or trusted.

A read that was cancelled, or whose peer froze, can land long afterwards. Only its terminal state
proves that it will not; until then its blocks keep their ids and generations, whatever their
owner does.
"""

from collections.abc import Sequence

import pytest

from blockmgr.block_manager import BlockManager
from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState
from core.errors import DoubleReleaseError, InvalidTransitionError, OutOfBlocksError
from core.ids import BlockId, Generation, OperationId, Owner
from core.kv_layout import KVGroup
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import admit_new, ids_of, num_free, owner_of, run_of, take_one

READ = OperationId(1)
WHOLE = [ReceiveTarget(group=0, first_index=0, count=3)]


def test_c25_what_a_read_writes_is_frozen_while_its_owner_grows(
    make_manager: MakeManager,
) -> None:
    # Given a request that is receiving 3 blocks
    blocks = make_manager(10, zero_on_allocate=True)
    owner = admit_new(blocks, "R", 0)
    (received,) = blocks.begin_receive(owner, WHOLE, READ)

    # When it asks for one more
    blocks.grow(owner, 49)

    # Then the new block follows normal rules, and the read still names the same blocks
    (new,) = ids_of(blocks, owner)[3:]
    assert blocks.state(new) is BlockState.ACTIVE
    assert blocks.counts()[BlockState.RECEIVING] == 3
    assert blocks.operation_blocks(READ) == received
    assert [(at, blocks.generation(at)) for at, _ in received] == received
    blocks.dispatch_step([owner])
    assert blocks.take_zero_list() == (new,)
    blocks.end_operation(READ)
    assert blocks.operation_blocks(READ) == []


def test_a_released_receive_is_quarantined_until_it_is_terminal(
    make_manager: MakeManager,
) -> None:
    blocks = make_manager(4)
    owner = admit_new(blocks, "R", 0)
    (received,) = blocks.begin_receive(owner, WHOLE, READ)

    blocks.release(owner)

    # Then nobody gets its blocks, however many ask
    assert blocks.counts()[BlockState.QUARANTINED] == 3
    take_one(blocks, "S")
    with pytest.raises(OutOfBlocksError):
        take_one(blocks, "T")
    assert [blocks.generation(at) for at, _ in received] == [1, 1, 1]
    blocks.end_operation(READ)
    assert num_free(blocks) == 3
    assert take_one(blocks, "U") == received[2][0]
    assert blocks.generation(received[2][0]) == 2


def test_an_operation_ends_once(make_manager: MakeManager) -> None:
    blocks = make_manager(4)
    owner = admit_new(blocks, "R", 0)
    blocks.begin_receive(owner, WHOLE, READ)
    with pytest.raises(InvalidTransitionError):
        blocks.begin_receive(owner, [ReceiveTarget(0, 3, 1)], READ)
    blocks.end_operation(READ)

    with pytest.raises(DoubleReleaseError):
        blocks.end_operation(READ)

    assert blocks.stats.double_releases == 1
    assert blocks.counts()[BlockState.ACTIVE] == 3


def test_tokens_that_may_not_have_landed_cannot_settle(make_manager: MakeManager) -> None:
    blocks = make_manager(4)
    owner = admit_new(blocks, "R", 0, tokens=range(48))
    blocks.begin_receive(owner, [ReceiveTarget(0, 0, 1)], READ)
    blocks.begin_receive(owner, [ReceiveTarget(0, 1, 2)], OperationId(2))
    blocks.end_operation(READ)

    # The first block has landed, the others have not
    blocks.settle(owner, 16)
    with pytest.raises(InvalidTransitionError):
        blocks.settle(owner, 48)

    assert blocks.count_cached_tokens(run_of(range(48))) == 16
    blocks.end_operation(OperationId(2))
    blocks.settle(owner, 48)
    assert blocks.count_cached_tokens(run_of(range(48))) == 48


def test_chunks_may_arrive_in_any_order(make_manager: MakeManager) -> None:
    blocks = make_manager(8, KVGroup(layers=(0,)), KVGroup(layers=(1,), window=17))
    owner = admit_new(blocks, "R", 0)
    blocks.begin_receive(owner, [ReceiveTarget(0, 2, 2), ReceiveTarget(1, 2, 2)], READ)
    assert blocks.num_tokens_covered(owner) == 0
    blocks.begin_receive(owner, [ReceiveTarget(0, 0, 2)], OperationId(2))

    # The window group never receives its first blocks
    assert blocks.num_tokens_covered(owner) == 64
    assert blocks.block_tables(owner)[1].tolist()[:2] == [-1, -1]
    blocks.end_operation(OperationId(2))
    blocks.end_operation(READ)
    blocks.settle(owner, 64)
    blocks.grow(owner, 65)
    blocks.release(owner)
    assert blocks.num_allocatable == 8


@pytest.mark.parametrize(
    "targets",
    [
        [ReceiveTarget(0, 0, 0)],
        [ReceiveTarget(0, 1, 2)],
        [ReceiveTarget(0, 2, 2), ReceiveTarget(0, 3, 1)],
    ],
    ids=["empty", "has a block", "overlap"],
)
def test_impossible_targets_change_nothing(
    make_manager: MakeManager, targets: list[ReceiveTarget]
) -> None:
    blocks = make_manager(8)
    owner = admit_new(blocks, "R", 32)

    with pytest.raises(InvalidTransitionError):
        blocks.begin_receive(owner, targets, READ)

    assert num_free(blocks) == 6
    assert not blocks.operation_blocks(READ)


def test_i8_a_receive_that_does_not_fit_takes_nothing(make_manager: MakeManager) -> None:
    blocks = make_manager(4)
    owner = admit_new(blocks, "R", 16)

    with pytest.raises(OutOfBlocksError) as failure:
        blocks.begin_receive(owner, [ReceiveTarget(0, 1, 4)], READ)

    assert (failure.value.requested, failure.value.free) == (4, 3)
    assert num_free(blocks) == 3
    assert len(ids_of(blocks, owner)) == 1
    blocks.begin_receive(owner, [ReceiveTarget(0, 1, 3)], READ)
    blocks.end_operation(READ)


def test_a_copy_may_name_only_blocks_of_its_owner(make_manager: MakeManager) -> None:
    blocks = make_manager(4)
    owner, other = admit_new(blocks, "R", 16), admit_new(blocks, "S", 16)
    (mine,), (theirs,) = ids_of(blocks, owner), ids_of(blocks, other)
    for named in ([theirs], [mine, theirs], [mine, mine], [BlockId(3)]):
        with pytest.raises(InvalidTransitionError):
            blocks.begin_operation(owner, named, READ)

    assert not blocks.has_pending


# Clearing


def test_b05_a_block_that_a_load_fills_is_never_cleared(make_manager: MakeManager) -> None:
    # Given a request that loads two blocks and computes a third
    blocks = make_manager(4, zero_on_allocate=True)
    owner = admit_new(blocks, "R", 0)
    blocks.begin_receive(owner, [ReceiveTarget(0, 0, 2)], READ)
    blocks.grow(owner, 48)

    blocks.dispatch_step([owner])

    # Then only the third is cleared, once
    assert blocks.take_zero_list() == (ids_of(blocks, owner)[2],)
    assert blocks.take_zero_list() == ()
    blocks.end_operation(READ)


def test_b05_a_block_let_go_before_it_was_cleared_is_not_cleared(
    make_manager: MakeManager,
) -> None:
    # Given a block that was to be cleared, but lost its owner and is a read's target now
    blocks = make_manager(1, zero_on_allocate=True)
    owner = admit_new(blocks, "R", 16)
    blocks.release(owner)
    receiver = admit_new(blocks, "S", 0)
    blocks.begin_receive(receiver, [ReceiveTarget(0, 0, 1)], READ)

    blocks.dispatch_step([receiver])

    assert blocks.take_zero_list() == ()
    blocks.end_operation(READ)


def test_b05_clearing_fences_an_owner_that_is_not_in_the_step(make_manager: MakeManager) -> None:
    # Given R's new block on the zero list of a step that runs only S
    blocks = make_manager(4, zero_on_allocate=True)
    owner, other = admit_new(blocks, "R", 16), admit_new(blocks, "S", 16)
    step = blocks.dispatch_step([other])
    assert len(blocks.take_zero_list()) == 2

    # When R ends before that step has run
    blocks.release(owner)

    # Then its block waits: the device will still write zeros into it
    assert blocks.counts()[BlockState.FENCED] == 1
    blocks.complete_step(step)
    assert num_free(blocks) == 3


def test_blocks_to_clear_need_a_step_that_clears_them(make_manager: MakeManager) -> None:
    blocks = make_manager(4, zero_on_allocate=True)
    owner = admit_new(blocks, "R", 16)
    with pytest.raises(InvalidTransitionError):
        blocks.take_zero_list()
    blocks.dispatch_step([owner])
    assert blocks.take_zero_list() == tuple(ids_of(blocks, owner))


def test_nothing_is_cleared_unless_asked_for(make_manager: MakeManager) -> None:
    blocks = make_manager(4)
    blocks.dispatch_step([admit_new(blocks, "R", 16)])
    assert blocks.take_zero_list() == ()


# The guards switched off


class ClearsEverything(BlockManager):
    """The zero skip switched off: received blocks are cleared like all others."""

    def begin_receive(
        self, owner: Owner, targets: Sequence[ReceiveTarget], operation: OperationId
    ) -> list[list[tuple[BlockId, Generation]]]:
        placed = super().begin_receive(owner, targets, operation)
        holding = self._holdings[owner]
        self._zero_list.add(holding.release_order, holding)
        return placed


def test_b05_fails_without_the_zero_skip(make_manager: MakeManager) -> None:
    blocks = make_manager(4, kind=ClearsEverything, zero_on_allocate=True)
    owner = admit_new(blocks, "R", 0)
    ((received,),) = blocks.begin_receive(owner, [ReceiveTarget(0, 0, 1)], READ)
    blocks.dispatch_step([owner])

    assert received[0] in blocks.take_zero_list(), "the zeros race the bytes that land"
    blocks.end_operation(READ)


class CancelIsTerminal(BlockManager):
    """The guard switched off: what is released is no longer being read into."""

    def release(self, owner: Owner) -> None:
        holding = self._holdings[owner]
        for operation, pending in self._operations.items():
            if pending.holding is holding:
                self.end_operation(operation)
        super().release(owner)


def test_c21_fails_where_a_cancel_counts_as_terminal(make_manager: MakeManager) -> None:
    blocks = make_manager(3, kind=CancelIsTerminal)
    owner = admit_new(blocks, "R", 0)
    (received,) = blocks.begin_receive(owner, WHOLE, READ)

    blocks.release(owner)

    newcomer = admit_new(blocks, "S", 48)
    stale = {at for at, _ in received}
    assert stale == set(ids_of(blocks, newcomer)), "the late read lands in S's blocks"
    # The generation still tells: a completion that names the old ones is dropped
    assert all(blocks.generation(at) != generation for at, generation in received)


def test_a_released_owner_cannot_receive(make_manager: MakeManager) -> None:
    blocks = make_manager(4)
    with pytest.raises(InvalidTransitionError):
        blocks.begin_receive(owner_of("nobody"), WHOLE, READ)
