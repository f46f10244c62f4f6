"""Random lives of many requests over two sources and a hostile network, against a byte oracle.

After every event: no delivered request has a byte that is not its own, no block is free while a
write for it may still land, and blocks of both sides add up. At the end everything is free.
"""

import random

import pytest

from blockmgr.states import BlockState
from core.config import TransferConfig
from core.errors import OutOfBlocksError
from core.ids import BlockId, Owner
from core.messages import PieceId, PrefillFailed
from tests.transfer.adversary import Network
from tests.transfer.two_sides import DecodeSide, PrefillSide, layout, owner

NUM_BLOCKS = 24


class World:
    """One decode side and two sources, driven by a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kv = layout(num_groups=self.rng.choice([1, 2]))
        self.network = Network()
        self.decode = DecodeSide(
            self.network,
            self.kv,
            num_blocks=NUM_BLOCKS,
            max_quarantined_blocks=self.rng.choice([4, 8, 1000]),
            config=TransferConfig(read_timeout_s=self.rng.choice([30.0, 300.0])),
            rng=random.Random(seed + 1),
        )
        self.sources: list[PrefillSide] = []
        self.plans: dict[Owner, tuple[PrefillSide, list[int]]] = {}
        """Source and sizes of the chunks to come."""
        self.done: dict[Owner, list[int]] = {}
        """Blocks per chunk that are computed."""
        self.num_sources = 0
        self.num_requests = 0
        for _ in range(2):
            self.add_source()

    def add_source(self) -> None:
        self.num_sources += 1
        source = PrefillSide(self.network, self.kv, f"P{self.num_sources}", num_blocks=200)
        self.sources.append(source)
        self.decode.pair(source)

    # Events

    def start(self) -> None:
        source = self.rng.choice(self.sources)
        self.num_requests += 1
        who = owner(f"r{self.rng.randrange(6)}", self.num_requests)
        if not self.decode.nic.is_connected(source.incarnation):
            self.decode.pair(source)
        self.decode.request(who, source)
        source.book.open(who, reader="D")
        self.plans[who] = (source, [self.rng.randint(0, 2) for _ in range(self.rng.randint(1, 3))])

    def chunk(self) -> None:
        """A source finishes the next chunk of somebody."""
        ready = [who for who, (_, sizes) in self.plans.items() if sizes]
        if not ready:
            return
        who = self.rng.choice(ready)
        source, sizes = self.plans[who]
        if who not in source.book:
            sizes.clear()
            return
        done = self.done.setdefault(who, [])
        ticket = source.compute(
            who,
            self.decode.now,
            first_index=sum(done),
            num_blocks=sizes[0],
            piece=PieceId(0, self.kv.layers_per_group - 1, len(done)),
            last=len(sizes) == 1,
        )
        done.append(sizes.pop(0))
        self.decode.ticket(ticket)
        if self.rng.random() < 0.2:
            self.decode.ticket(ticket)

    def land(self) -> None:
        self.decode.nic.duplicates_outcomes = self.rng.random() < 0.2
        self.decode.nic.step(self.rng.randint(1, 4))
        self.decode.poll()

    def finish_decoding(self) -> None:
        for who in list(self.decode.delivered):
            if self.decode.blocks.holds(who) and self.rng.random() < 0.7:
                self.decode.forget(who)
        self.decode.retry()

    def cancel(self) -> None:
        if self.plans:
            self.decode.cancel(self.rng.choice(list(self.plans)))

    def roll_back(self) -> None:
        receiving = [who for who in self.plans if self.decode.reader.is_receiving(who)]
        if receiving:
            self.decode.roll_back(self.rng.choice(receiving))
            self.decode.retry()

    def talk(self) -> None:
        self.decode.exchange()

    def wait(self) -> None:
        self.decode.now += self.rng.choice([0.1, 3.0, 16.0])
        self.decode.tick()
        for source in self.sources:
            source.expire(self.decode.now)

    def freeze(self) -> None:
        source = self.rng.choice(self.sources)
        if self.decode.nic.is_connected(source.incarnation):
            self.decode.nic.freeze(source.incarnation)

    def thaw(self) -> None:
        for source in self.sources:
            self.decode.nic.thaw(source.incarnation)

    def give_up(self) -> None:
        """A source fails one request."""
        if not self.plans:
            return
        who = self.rng.choice(list(self.plans))
        source, sizes = self.plans[who]
        sizes.clear()
        if who in source.book:
            if source.book.revoke(who):
                source.give_back(who)
            message = PrefillFailed(*who, source.incarnation, "fuzz")
            self.decode.carry_out(self.decode.reader.prefill_failed(message, self.decode.now))

    def lose_source(self) -> None:
        """A source restarts as another incarnation; its pool is gone."""
        source = self.sources.pop(self.rng.randrange(2))
        self.decode.nic.kill(source.incarnation)
        del self.decode.sources[source.incarnation]
        actions = self.decode.reader.source_lost(source.incarnation, "fuzz", self.decode.now)
        self.decode.carry_out(actions)
        self.decode.poll()
        self.add_source()

    # What must hold

    def check(self) -> None:
        decode = self.decode
        decode.check()
        for who in decode.delivered:
            if decode.blocks.holds(who):
                assert decode.wrong_positions(who) == [], who
        size = self.kv.block_nbytes
        for write in decode.nic.writes:
            first = (write.to_address - decode.pool.address) // size
            for block in range(first, first + write.nbytes // size):
                assert decode.blocks.state(BlockId(block)) is not BlockState.FREE, block

    def settle(self) -> None:
        """Stop the faults and let time pass: everything must come home."""
        for who in list(self.plans):
            self.decode.cancel(who)
        self.thaw()
        self.decode.land_all()
        self.decode.exchange()
        for source in self.sources:
            source.expire(self.decode.now + 1000)
        assert self.decode.num_free == NUM_BLOCKS
        assert self.decode.reader.num_operations == 0
        assert self.decode.reader.next_deadline() is None
        assert len(set(self.decode.ended)) == len(self.decode.ended)
        for source in self.sources:
            assert len(source.book) == 0
            assert len(source.free) == 200


@pytest.mark.parametrize("seed", range(40))
def test_j01_random_lives_never_trust_or_leak(seed: int) -> None:
    world = World(seed)
    events = [
        *[world.start] * 4,
        *[world.chunk] * 8,
        *[world.land] * 8,
        *[world.finish_decoding] * 4,
        world.talk,
        *[world.wait] * 2,
        world.cancel,
        world.roll_back,
        world.freeze,
        world.thaw,
        world.give_up,
    ]
    for step in range(250):
        event = world.lose_source if step % 97 == 96 else world.rng.choice(events)
        try:
            event()
        except OutOfBlocksError:
            continue
        world.check()
    world.settle()
