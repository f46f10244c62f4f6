"""Received blocks are trusted only in the life for which their read was posted."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from blockmgr.block_manager import BlockManager
from blockmgr.receive_target import ReceiveTarget
from core.channel import DeploymentKeys
from core.config import SchedulerConfig, TransferConfig
from core.ids import Attempt, Incarnation, OperationId, Owner, RequestId
from core.messages import Compatibility, FirstToken, GroupBlocks, Hello
from core.sampling import SamplingParams
from core.trace import Recorder
from decode.delivery import Delivery, Loss
from decode.landing import Memory
from decode.receiver import Receiver
from decode.scheduler import DecodeScheduler
from decode.sequence import Sequence
from decode.sources import Sources
from decode.tracing import DecodeTrace
from tests.decode.bench import LAYOUT
from tests.transfer.adversary import AdversaryNic, Network
from transfer.actions import Deliver, ReceiveStats
from transfer.rank_reads import RankReads
from transfer.reader import Reader

R: Owner = (RequestId("R"), Attempt(1))
READ = OperationId(1)
COMPATIBILITY = Compatibility(
    model_fingerprint="m",
    tokenizer_fingerprint="t",
    kv_layout=LAYOUT,
    total_kv_heads=LAYOUT.num_kv_heads,
    model_dtype=LAYOUT.dtype,
)
NOTHING = ReceiveStats(
    kv_nbytes=0, num_tickets=1, num_cached_tokens=0, prefill_s=0.0, transfer_s=0.0
)


@dataclass
class Told:
    """What the receiver has told the worker."""

    deliveries: list[Delivery] = field(default_factory=list[Delivery])
    losses: list[Loss] = field(default_factory=list[Loss])

    def delivered(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)

    def lost(self, loss: Loss) -> None:
        self.losses.append(loss)

    def memory_changed(self) -> None:
        """Nobody waits here."""


class Side:
    """A receiver over a real pool of blocks, with R's read in it."""

    def __init__(self) -> None:
        self.blocks = BlockManager(LAYOUT, 8, fences=True, prefix_caching=True)
        scheduler = DecodeScheduler(self.blocks, LAYOUT, SchedulerConfig(), fingerprint="test")
        scheduler.add(
            Sequence(R, tuple(range(32)), SamplingParams(seed=1, max_tokens=4)), remote=True
        )
        placed = scheduler.receive(R, [ReceiveTarget(0, 0, 2)], READ)
        assert placed is not None
        self.named = GroupBlocks(
            group=0,
            first_index=0,
            block_ids=tuple(block_id for block_id, _ in placed[0]),
            generations=tuple(generation for _, generation in placed[0]),
        )
        self.told = Told()
        reader = Reader(layout=LAYOUT, config=TransferConfig(), max_quarantined_blocks=4)
        keys, hello = (
            DeploymentKeys.generate().of("decode"),
            Hello(name="D", incarnation=Incarnation("D")),
        )
        self.receiver = Receiver(
            reader=reader,
            compatibility=COMPATIBILITY,
            open_reads=lambda on_end, on_begun: RankReads(
                AdversaryNic(Network()),
                compatibility=COMPATIBILITY,
                scratch_offset=0,
                config=TransferConfig(),
                stats=reader.stats,
                on_end=on_end,
                on_begun=on_begun,
            ),
            open_sources=lambda receiver: Sources(keys, hello, receiver),
            memory=Memory(self.blocks, scheduler, lambda ids, _: [b""] * len(ids)),
            owner=self.told,
            registry=CollectorRegistry(),
            trace=DecodeTrace(Recorder(lambda: 0.0)),
        )

    def deliver(self) -> None:
        self.receiver._carry_out([Deliver(R, FirstToken(7), (self.named,), NOTHING)])


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    made = Side()
    yield made
    await made.receiver.close()
    made.blocks.check_invariants()


async def test_i01_blocks_in_the_life_of_their_read_are_delivered(side: Side) -> None:
    side.blocks.end_operation(READ)
    side.deliver()
    assert [delivery.owner for delivery in side.told.deliveries] == [R]
    assert side.told.losses == []


async def test_i01_blocks_that_changed_hands_are_not_trusted_and_their_owner_is_unharmed(
    side: Side,
) -> None:
    # Given R's blocks at generation 1, which somebody else has at generation 2
    side.blocks.end_operation(READ)
    side.blocks.release(R)
    newcomer: Owner = (RequestId("newcomer"), Attempt(1))
    side.blocks.admit(newcomer, tokens=None, num_cached_tokens=0, num_tokens=128)
    before = side.blocks.counts()
    # When R's delivery comes late
    side.deliver()
    # Then it is lost with the reason, and the newcomer's blocks are as they were
    assert side.told.deliveries == []
    (loss,) = side.told.losses
    assert "changed hands" in loss.reason
    assert side.blocks.counts() == before
