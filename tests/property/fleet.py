"""A whole fleet in virtual time: clients, prefill and decode workers, slow channels, kills."""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from core.config import SchedulerConfig, SluiceConfig, TransferConfig
from core.ids import Attempt, Incarnation, Owner, RequestId
from core.kv_layout import KVGroup, KVLayout
from core.sampling import SamplingParams
from decode.sequence import Sequence
from tests.property.virtual_decode import VirtualDecode
from tests.property.virtual_prefill import VirtualPrefill
from tests.property.virtual_tiers import HostMemory
from tests.property.virtual_time import Simulation

BLOCK_SIZE = 4
TRANSFER = TransferConfig(lease_s=30.0, renew_interval_s=5.0)
SHAPES = (
    (KVGroup(layers=(0, 1, 2, 3)),),
    (KVGroup(layers=(0, 2, 4)), KVGroup(layers=(1, 3, 5), window=9, num_sinks=1)),
    (KVGroup(layers=(0, 1, 2), window=6), KVGroup(layers=(3, 4, 5), window=17)),
)


@dataclass
class Client:
    """One request, over all its attempts."""

    prompt: tuple[int, ...]
    max_tokens: int
    decode: VirtualDecode
    attempt: int = 0
    num_outputs: int = 0
    is_finished: bool = False
    has_left: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens in one run."""

    num_requests: int = 30
    num_prefill: int = 2
    num_decode: int = 2
    num_blocks: int = 24
    """Of each pool, per KV group."""
    abort_rate: float = 0.1
    num_kills: int = 0
    num_slots: int = 0
    """Blocks of host memory of each worker, per KV group; 0: no tiers, and no storage."""
    load_failure: Literal["recompute", "fail"] = "fail"
    layer_ranges: int = 1
    prefill_block_size: int = BLOCK_SIZE
    """Decode's is ``BLOCK_SIZE``."""
    scheduler: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(max_num_seqs=8, max_batch_tokens=16)
    )


class Fleet:
    """Runs a plan. ``last_progress`` is when a request last came nearer to its end."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.simulation = Simulation(seed)
        self.rng = self.simulation.rng
        self.plan = plan
        # Larger blocks on decode do not go together with windows.
        shapes = SHAPES if plan.prefill_block_size >= BLOCK_SIZE else SHAPES[:1]
        self.layout = KVLayout(
            self.rng.choice(shapes), BLOCK_SIZE, num_kv_heads=1, head_dim=4, dtype="float32"
        )
        self.prefill_layout = msgspec.structs.replace(
            self.layout, block_size=plan.prefill_block_size
        )
        transfer = TRANSFER.model_copy(
            update={"load_failure": plan.load_failure, "layer_ranges": plan.layer_ranges}
        )
        self.config = SluiceConfig(scheduler=plan.scheduler, transfer=transfer)
        self.last_progress = 0.0
        self.host = HostMemory(len(self.layout.groups) * plan.num_slots, storage=set())
        self.clients: dict[str, Client] = {}
        self.prefills: dict[Incarnation, VirtualPrefill] = {}
        self.num_killed = 0
        self.num_lost = 0
        self.decodes = [self._make_decode(f"D{at}") for at in range(plan.num_decode)]
        for _ in range(plan.num_prefill):
            self._start_prefill()
        for at in range(plan.num_requests):
            self.simulation.after(self.rng.random() * 4, lambda at=at: self._arrive(f"R{at}"))
        for _ in range(plan.num_kills):
            self.simulation.after(self.rng.random() * 6, self._kill)
        self._tick()

    @property
    def num_copies(self) -> int:
        """Copies and storage calls that have ended, of all workers."""
        workers = [*self.decodes, *self.prefills.values()]
        return sum(worker.mover.num_ended for worker in workers)

    @property
    def num_early_tickets(self) -> int:
        """Tickets for the first layers of a last chunk, of all prefill workers."""
        return sum(prefill.num_early_tickets for prefill in self.prefills.values())

    @property
    def num_preemptions(self) -> int:
        """Of all decode workers."""
        return sum(decode.scheduler.num_preemptions for decode in self.decodes)

    @property
    def num_recomputed(self) -> int:
        """Requests whose KV did not come, and which were computed where they were."""
        return sum(decode.num_recomputed for decode in self.decodes)

    @property
    def unfinished(self) -> list[str]:
        """Clients that still wait for tokens."""
        return [
            name
            for name, client in self.clients.items()
            if not client.is_finished and not client.has_left
        ]

    def run(self, *, patience: float) -> None:
        """Play until every client has been served; nothing may stall for ``patience`` seconds."""
        while len(self.clients) < self.plan.num_requests or self.unfinished:
            assert self.simulation.step(), f"nothing happens, and {self.unfinished} wait"
            stalled = self.simulation.now - self.last_progress
            assert not self.unfinished or stalled < patience, self.describe()
        end = self.simulation.now + 2 * TRANSFER.lease_s
        while self.simulation.now < end:
            assert self.simulation.step()

    def check_all_free(self) -> None:
        """Nothing is held, promised or leased any more, anywhere."""
        for decode in self.decodes:
            decode.scheduler.check_invariants()
            decode.reader.check_invariants()
            assert decode.blocks.num_allocatable == decode.blocks.num_blocks, decode.blocks.counts()
            assert decode.scheduler.num_waiting == decode.scheduler.num_running == 0
        for prefill in self.prefills.values():
            if prefill.is_dead:
                continue
            prefill.scheduler.check_invariants()
            assert prefill.blocks.num_allocatable == prefill.blocks.num_blocks, prefill.incarnation
            assert len(prefill.book) == 0

    def describe(self) -> str:
        """Return where everything is, for the report of a stall."""
        lines = [f"stalled since {self.last_progress:.2f}, now {self.simulation.now:.2f}"]
        for decode in self.decodes:
            counts = {state.name: n for state, n in decode.blocks.counts().items() if n}
            unallocated = [owner for owner, _ in decode.reader.unallocated()]
            lines.append(f"{decode.name} {counts} tickets without memory {unallocated}")
            table = decode.scheduler._table
            lines.append(f"  promised {decode.scheduler._budget.promised}")
            lines += [
                f"  {sequence.owner} {sequence.state.name} promised={sequence.promised_blocks} "
                f"computed={sequence.num_computed} of {sequence.num_tokens}"
                for sequence in table._sequence_of.values()
            ]
        for prefill in self.prefills.values():
            counts = {state.name: n for state, n in prefill.blocks.counts().items() if n}
            lines.append(f"{prefill.incarnation} {counts} live {prefill.scheduler.owners}")
        return "\n".join(lines)

    # Router

    def progressed(self, owner: Owner, *, is_finished: bool) -> None:
        """See ``Router``."""
        client = self.clients[owner[0]]
        if owner[1] == client.attempt:
            self.last_progress = self.simulation.now
            client.num_outputs += 1
            client.is_finished = is_finished

    def lost(self, owner: Owner) -> None:
        """See ``Router``: another attempt goes on after the tokens that were sent."""
        self.num_lost += 1
        self.simulation.send("decode", "router", lambda: self._retry(owner))

    def _retry(self, owner: Owner) -> None:
        client = self.clients[owner[0]]
        if owner[1] == client.attempt and not client.has_left:
            self._dispatch(owner[0])

    def _arrive(self, name: str) -> None:
        family, length = self.rng.randrange(3), self.rng.randint(1, 60)
        most = (self.plan.num_blocks - 1) * BLOCK_SIZE - length
        self.clients[name] = Client(
            prompt=tuple(range(1000 * family, 1000 * family + length)),
            max_tokens=self.rng.randint(1, min(most, 40)),
            decode=self.rng.choice(self.decodes),
        )
        self.last_progress = self.simulation.now
        self._dispatch(name)
        if self.rng.random() < self.plan.abort_rate:
            self.simulation.after(self.rng.random() * 3, lambda: self._leave(name))

    def _dispatch(self, name: str) -> None:
        client = self.clients[name]
        client.attempt += 1
        sequence = Sequence(
            owner=(RequestId(name), Attempt(client.attempt)),
            prompt_token_ids=client.prompt,
            sampling=SamplingParams(seed=1, max_tokens=client.max_tokens),
            output_token_ids=[7] * client.num_outputs,
        )
        alive = [at for at, prefill in self.prefills.items() if not prefill.is_dead]
        is_local = self.rng.random() < 0.2 or not alive
        source = None if is_local else self.rng.choice(alive)
        self.simulation.send(
            "router", client.decode.name, lambda: client.decode.generate(sequence, source)
        )

    def _leave(self, name: str) -> None:
        client = self.clients[name]
        client.has_left = True
        owner = (RequestId(name), Attempt(client.attempt))
        self.simulation.send("router", client.decode.name, lambda: client.decode.abort(owner))

    # Workers

    def _make_decode(self, name: str) -> VirtualDecode:
        def send(source: Incarnation, message: object) -> None:
            prefill = self.prefills[source]
            self.simulation.send(name, source, lambda: prefill.take(name, message))

        decode = VirtualDecode(
            self.simulation,
            self.layout,
            self._pool_size(self.layout),
            name=name,
            config=self.config,
            router=self,
            send=send,
            host=self.host,
        )
        decode.shake_hands(self.plan.prefill_block_size)
        return decode

    def _start_prefill(self) -> None:
        name = f"P{len(self.prefills)}"
        decodes = {decode.name: decode for decode in self.decodes}

        def reply(reader: str, message: object) -> None:
            decode = decodes[reader]
            self.simulation.send(name, reader, lambda: decode.take(Incarnation(name), message))

        self.prefills[Incarnation(name)] = VirtualPrefill(
            self.simulation,
            self.prefill_layout,
            self._pool_size(self.prefill_layout),
            name=name,
            config=self.config,
            reply=reply,
            host=self.host,
        )

    def _pool_size(self, layout: KVLayout) -> int:
        """Return the blocks that hold what ``num_blocks`` of decode's do, per group."""
        return len(layout.groups) * layout.num_blocks_for(self.plan.num_blocks * BLOCK_SIZE)

    def _kill(self) -> None:
        """A prefill worker dies; its readers notice, and another life takes its place."""
        alive = [prefill for prefill in self.prefills.values() if not prefill.is_dead]
        victim = self.rng.choice(alive)
        victim.is_dead = True
        self.num_killed += 1
        for decode in self.decodes:
            delay = self.rng.random() * 2
            self.simulation.after(delay, lambda decode=decode: decode.lose(victim.incarnation))
        self._start_prefill()

    def _tick(self) -> None:
        """Deadlines of readers and lease books."""
        for decode in self.decodes:
            decode.tick()
        for prefill in self.prefills.values():
            prefill.expire()
        self.simulation.after(0.5, self._tick)
