"""A sequence with windows is promised what its tickets name, and not what they leave out.

Promised too much, memory that windows let go would not become more sequences; promised too little,
two half-received sequences could wait for each other's blocks.
"""

from blockmgr.block_manager import ReceiveTarget
from core.ids import OperationId
from core.kv_layout import KVGroup, KVLayout
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
