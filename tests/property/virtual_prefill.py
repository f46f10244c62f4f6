"""A prefill worker without sockets: the real scheduler, block manager and ticket book."""

from collections.abc import Callable
from functools import partial

from core.config import SluiceConfig
from core.errors import RequestError
from core.ids import Incarnation, Owner
from core.kv_layout import KVLayout
from core.messages import PieceId, Prefill, PrefillFailed, Released, Renew, Withdraw
from engine.batch import SampledToken, StepBatch, StepOutput
from prefill.offers import SettledChunk
from prefill.scheduler import PrefillScheduler
from tests.property.virtual_tiers import HostMemory, VirtualMover, make_blocks
from tests.property.virtual_time import Device, Simulation
from transfer.tickets import Offer, TicketBook

Reply = Callable[[str, object], None]
"""Send a message to the decode worker of this name."""


class VirtualPrefill:
    """Takes messages and steps as ``prefill.worker`` does."""

    def __init__(
        self,
        simulation: Simulation,
        layout: KVLayout,
        num_blocks: int,
        *,
        name: str,
        config: SluiceConfig,
        reply: Reply,
        host: HostMemory,
    ) -> None:
        self.incarnation = Incarnation(name)
        self.is_dead = False
        self.num_early_tickets = 0
        # With a tier, loads write into the pool beside the steps.
        self.blocks, tiers = make_blocks(
            layout, num_blocks, fences=bool(host.num_slots), name=name, num_slots=host.num_slots
        )
        self.scheduler = PrefillScheduler(
            self.blocks,
            layout,
            config.scheduler,
            fingerprint="model",
            tiers=tiers,
            layer_ranges=config.transfer.layer_ranges,
        )
        self.mover = VirtualMover(simulation, tiers, host.storage, on_change=self.work)
        self.book = TicketBook(self.incarnation, config.transfer.lease_s)
        self._simulation = simulation
        self._depth = config.scheduler.overlap_depth
        self._device = Device(simulation)
        self._num_in_flight = 0
        self._reply = reply
        self._readers: dict[Owner, str] = {}

    def take(self, reader: str, message: object) -> None:
        """Do what a decode worker's message asks."""
        if self.is_dead:
            return
        match message:
            case Prefill():
                self._prefill(reader, message)
            case Renew():
                self._reply(reader, self.book.renew(message, self._simulation.now))
            case Released():
                self._release(self.book.released(message))
            case Withdraw():
                self._release(self.book.withdraw(message))
            case _:
                return
        self.work()

    def expire(self) -> None:
        """Free what nobody has renewed."""
        if not self.is_dead:
            for owner in self.book.expire(self._simulation.now):
                self._release(owner)
            self.work()

    def work(self) -> None:
        """Keep the device busy."""
        if not self.is_dead:
            self._keep_busy()
            self.mover.carry_out()

    def _keep_busy(self) -> None:
        while self._num_in_flight < self._depth:
            if (batch := self.scheduler.schedule()) is None:
                return
            self._num_in_flight += 1
            marks = [partial(self._layers_done, batch, mark) for mark in batch.layer_marks]
            self._device.run(lambda batch=batch: self._complete(batch), marks=marks)

    def _prefill(self, reader: str, request: Prefill) -> None:
        owner = (request.request_id, request.attempt)
        if not self.book.open(owner, reader=reader):
            return
        try:
            self.scheduler.add(request)
        except RequestError as error:
            self.book.revoke(owner)
            self._reply(reader, PrefillFailed(*owner, self.incarnation, str(error)))
        else:
            self._readers[owner] = reader

    def _release(self, owner: Owner | None) -> None:
        if owner is None:
            return
        if not self.scheduler.cancel(owner):
            self.blocks.release(owner)
        del self._readers[owner]

    def _complete(self, batch: StepBatch) -> None:
        if self.is_dead:
            return
        self._num_in_flight -= 1
        tokens = tuple(SampledToken(part.slot, 7) for part in batch.sequences if part.sample)
        for chunk in self.scheduler.complete(StepOutput(batch.step, tokens, 0.0)):
            self._issue(chunk)
        self.expire()

    def _layers_done(self, batch: StepBatch, mark: int) -> None:
        if not self.is_dead:
            for chunk in self.scheduler.layers_done(batch.step, mark):
                self._issue(chunk)
                self.num_early_tickets += 1

    def _issue(self, chunk: SettledChunk) -> None:
        owner = chunk.prompt.owner
        ticket = self.book.issue(
            owner,
            Offer(
                piece=PieceId(chunk.first_layer, chunk.last_layer, chunk.chunk),
                blocks=chunk.blocks,
                num_tokens=chunk.num_tokens,
                last=chunk.is_last,
                first_token=chunk.first_token,
            ),
            self._simulation.now,
        )
        if ticket is not None:
            self._reply(self._readers[owner], ticket)
