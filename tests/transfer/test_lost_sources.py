"""A source that dies, freezes or fails ends its requests in bounded time, and no others.

Their blocks come back when nothing can write them any more, which is later.
"""

from blockmgr.states import BlockState
from core.config import TransferConfig
from core.ids import OperationId
from core.messages import PrefillFailed, Reading, Withdraw
from tests.transfer.adversary import Network
from tests.transfer.conftest import MakeDecode
from tests.transfer.one_receive import R, start
from tests.transfer.two_sides import DecodeSide, PrefillSide, layout, owner
from transfer.actions import OperationTerminal, Send, TearDown, WarmUp


def test_c20_peer_dies_mid_receive(decode: DecodeSide, prefill: PrefillSide) -> None:
    """No completion will ever come: R fails at once, its blocks only after the teardown."""
    start(decode, prefill)
    decode.nic.step()
    decode.nic.freeze(prefill.incarnation)
    actions = decode.reader.source_lost(prefill.incarnation, "connection closed", decode.now)
    first, *rest = actions
    decode.carry_out(rest)
    assert decode.failed[R].is_retryable
    assert decode.count(BlockState.QUARANTINED) == 3
    assert decode.num_free == 7, "quarantined blocks cannot be allocated"
    decode.carry_out([first])
    assert decode.torn == [prefill.incarnation]
    assert decode.num_free == 10


def test_c20_bound_without_any_event(decode: DecodeSide, prefill: PrefillSide) -> None:
    """The source is frozen: the read's own timeout ends it."""
    start(decode, prefill)
    decode.nic.freeze(prefill.incarnation)
    for _ in range(20):
        deadline = decode.reader.next_deadline()
        if deadline is None:
            break
        decode.now = deadline
        decode.tick()
    assert decode.torn == [prefill.incarnation]
    assert decode.failed[R].is_retryable
    assert decode.num_free == 10
    assert decode.reader.stats.read_timeouts == 1


def test_c20_a_read_that_waits_its_turn_is_not_held_against_its_source(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    """It is held back behind others, in the queue or for room: its source knows nothing of it."""
    config = TransferConfig()
    reader, source = decode.reader, prefill.incarnation
    reader.warm_up(OperationId(91), source)
    assert reader.next_deadline() is None
    assert reader.tick(decode.now + 10 * config.read_timeout_s) == []
    began_at = decode.now + 11 * config.read_timeout_s
    reader.begun(OperationId(91), began_at)
    reader.begun(OperationId(91), began_at + 1.0)  # of what has begun, nothing begins again
    assert reader.next_deadline() == began_at + config.read_timeout_s
    (action,) = reader.tick(began_at + config.read_timeout_s)
    assert isinstance(action, TearDown)
    reader.read_failed(OperationId(91), "torn", began_at + config.read_timeout_s)
    reader.begun(OperationId(91), began_at)
    assert reader.next_deadline() is None


def test_a_warm_up_holds_no_block_and_is_bounded_as_every_read(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    source, reader = prefill.incarnation, decode.reader
    first, second = OperationId(91), OperationId(92)
    assert reader.warm_up(first, source) == [
        Send(source, Reading(active=True)),
        WarmUp(first, source),
    ]
    assert reader.is_in_use(source)
    assert reader.num_quarantined_blocks == 0
    assert reader.landed(first, 101.0) == [Send(source, Reading(active=False))]
    assert not reader.is_in_use(source)
    reader.warm_up(second, source)
    reader.begun(second, 102.0)
    assert reader.next_deadline() == 102.0 + TransferConfig().read_timeout_s
    (action,) = reader.tick(200.0)
    assert isinstance(action, TearDown)
    assert not any(
        isinstance(action, OperationTerminal) for action in reader.read_failed(second, "torn", 200)
    )


def test_c22_prefill_side_abort_after_allocation(decode: DecodeSide, prefill: PrefillSide) -> None:
    start(decode, prefill)
    decode.nic.step()
    message = PrefillFailed(*R, prefill.incarnation, "step failed")
    decode.carry_out(decode.reader.prefill_failed(message, decode.now))
    assert decode.failed[R].is_retryable
    assert "step failed" in decode.failed[R].reason
    assert decode.count(BlockState.QUARANTINED) == 3
    decode.land_all()
    assert decode.num_free == 10
    assert decode.delivered == {}
    decode.exchange()
    assert len(prefill.free) == 64, "the source was told, so it need not wait for its lease"


def test_h07_a_read_that_cannot_be_posted_fails_only_its_request(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    decode.request(R, prefill)
    decode.nic.kill(prefill.incarnation)
    decode.ticket(prefill.compute(R, 0, num_blocks=3))
    assert decode.failed[R].is_retryable
    assert decode.num_free == 10
    assert decode.torn == [prefill.incarnation], "the worker pairs with the source anew"


def test_quarantine_over_its_limit_tears_down_the_oldest_peer_only(
    network: Network, make_decode: MakeDecode, prefill: PrefillSide
) -> None:
    healthy = PrefillSide(network, layout(), "Q")
    decode = make_decode(num_blocks=20, max_quarantined_blocks=4)
    decode.pair(prefill)
    decode.pair(healthy)
    start(decode, prefill)
    decode.nic.freeze(prefill.incarnation)
    good = owner("good")
    decode.request(good, healthy)
    decode.ticket(healthy.compute(good, 0, num_blocks=4))
    decode.cancel(R)
    assert decode.torn == []
    late = owner("late")
    decode.request(late, prefill)
    decode.ticket(prefill.compute(late, 0, num_blocks=2))
    decode.cancel(late)

    assert decode.torn == [prefill.incarnation]
    assert decode.reader.stats.quarantine_alarms == 1
    assert decode.count(BlockState.QUARANTINED) == 0
    decode.land_all()
    assert list(decode.delivered) == [good]


def test_prefill_that_never_comes_is_bounded(decode: DecodeSide, prefill: PrefillSide) -> None:
    decode.request(R, prefill)
    decode.now += 121
    decode.tick()
    assert decode.failed[R].is_retryable
    assert Withdraw(*R) in decode.sent
