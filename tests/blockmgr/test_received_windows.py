"""Received KV has no block behind a window: nothing may stand for what is not there."""

from blockmgr.receive_target import ReceiveTarget
from core.ids import OperationId
from core.kv_layout import KVGroup
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import admit_new, admit_with_hit, run_of

GROUPS = (KVGroup(layers=(0,)), KVGroup(layers=(1,), window=32))
TOKENS = range(128)


def test_d16_holes_of_a_received_window_are_offered_as_holes(make_manager: MakeManager) -> None:
    # Given a prompt of which the group with a window was sent the last three blocks only
    blocks = make_manager(24, *GROUPS)
    owner = admit_new(blocks, "R", 0, tokens=TOKENS)
    blocks.begin_receive(owner, [ReceiveTarget(0, 0, 8), ReceiveTarget(1, 5, 3)], OperationId(1))
    blocks.end_operation(OperationId(1))
    # When it has settled
    blocks.settle(owner, 128)
    # Then exactly its blocks are cached, and a hit goes on with them
    blocks.check_invariants()
    blocks.release(owner)
    assert blocks.count_cached_tokens(run_of(TOKENS)) == 128
    assert admit_with_hit(blocks, "S", TOKENS) == 128
