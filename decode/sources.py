"""The channels of a decode worker to the prefill workers that it reads from."""

import asyncio
import logging
from collections.abc import Hashable, Sequence
from typing import Final, Protocol

from core.channel import ChannelKeys, ClientChannel
from core.errors import HandshakeError, PeerLostError, TransferError
from core.ids import Incarnation, Owner, WorkerId
from core.messages import AnyMessage, Hello, Prefill, PrefillPeer, Welcome
from core.tasks import raise_in_loop
from decode.prewarming import Prewarming
from decode.refusals import Refusals

log = logging.getLogger(__name__)

HAS_LEFT: Final = "it has left"


def level_of_loss(reason: str) -> int:
    """Return how loud the end of a source is told: that of one which has drained is no trouble."""
    return logging.INFO if reason == HAS_LEFT else logging.WARNING


class Source:
    """One life of one prefill worker."""

    def __init__(self, peer: PrefillPeer, channel: ClientChannel) -> None:
        self.worker_id: WorkerId = peer.worker_id
        self.incarnation: Incarnation = peer.incarnation
        self.channel = channel
        self.is_connected = False
        self.has_left = False
        """It is closed as soon as nothing of it is wanted any more."""
        self.queued: dict[Owner, Prefill] = {}
        """Wait for the handshake."""
        self.task: asyncio.Task[None] | None = None


class SourcesOwner(Protocol):
    """What ``Sources`` tells."""

    def paired(self, source: Source, welcome: Welcome, *, seconds: float) -> None:
        """``source`` has taken us; what is queued is asked for next.

        Raises:
            TransferError: nothing can be read from it. It is lost.
        """
        ...

    def is_in_use(self, incarnation: Incarnation) -> bool:
        """Whether a request to that source, or a read from there, has not ended."""
        ...

    def asking(self, source: Source, message: Prefill) -> None:
        """``message`` is about to be sent."""
        ...

    def received(self, source: Source, message: AnyMessage) -> None:
        """``source`` has sent ``message``."""
        ...

    def refused(self, owner: Owner, peer: PrefillPeer, reason: str) -> None:
        """``owner`` was not asked for: ``peer`` and this worker do not go together."""
        ...

    def lost(self, source: Source, reason: str) -> None:
        """Nothing more comes of ``source``; what is still queued was never asked for."""
        ...


class Sources:
    """Opens a channel to a prefill worker when a router knows it, at the latest when it is asked.

    Belongs to one event loop.
    """

    def __init__(self, keys: ChannelKeys, hello: Hello, owner: SourcesOwner) -> None:
        self._keys = keys
        self._hello = hello
        self._owner = owner
        self._clock = asyncio.get_running_loop().time
        self._sources: dict[Incarnation, Source] = {}
        self._prewarming = Prewarming()
        self._refusals = Refusals()
        self._timer: asyncio.TimerHandle | None = None
        self._is_one_leaving = False

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def num_connected(self) -> int:
        """Sources that have taken us."""
        sources = list(self._sources.values())  # at once: scrapes come from another thread
        return sum(source.is_connected for source in sources)

    def get(self, incarnation: Incarnation) -> Source | None:
        """Return the source of that life, unless it is lost."""
        return self._sources.get(incarnation)

    def ask(self, peer: PrefillPeer, message: Prefill) -> None:
        """Send ``message`` to ``peer``, as soon as a channel leads there."""
        owner = (message.request_id, message.attempt)
        if (reason := self._refusals.reason(peer.incarnation, self._clock())) is not None:
            asyncio.get_running_loop().call_soon(self._owner.refused, owner, peer, reason)
            return
        source = self._sources.get(peer.incarnation) or self._open(peer)
        if source.is_connected:
            self._send(source, message)
        else:
            source.queued[owner] = message

    def announced(self, router: Hashable, peers: Sequence[PrefillPeer]) -> None:
        """``router`` knows ``peers``, and no others: pair with them now."""
        for incarnation in self._prewarming.announced(router, peers, self._clock()):
            if (source := self._sources.get(incarnation)) is not None:
                source.has_left = self._is_one_leaving = True
        for peer in peers:
            if (source := self._sources.get(peer.incarnation)) is not None:
                source.has_left = False
        self.close_left()
        self._prewarm()

    def router_lost(self, router: Hashable) -> None:
        """``router`` is gone, for now."""
        self._prewarming.router_lost(router)

    def warmed(self, incarnation: Incarnation) -> None:
        """A first read from that source has landed."""
        self._prewarming.warmed(incarnation)

    def close_left(self) -> None:
        """Close the channels to sources that have left and that nobody uses."""
        if not self._is_one_leaving:
            return
        left = [source for source in self._sources.values() if source.has_left]
        unused = [
            source
            for source in left
            if not source.queued and not self._owner.is_in_use(source.incarnation)
        ]
        self._is_one_leaving = len(left) > len(unused)
        for source in unused:
            self._lose(source, HAS_LEFT)

    def withdraw(self, owner: Owner) -> None:
        """Do not ask for ``owner``, if that has not been done yet."""
        for source in self._sources.values():
            source.queued.pop(owner, None)

    def close(self) -> None:
        """Close every channel; nobody is told."""
        if self._timer is not None:
            self._timer.cancel()
        for source in self._sources.values():
            if source.task is not None:
                source.task.cancel()
            source.channel.close()
        self._sources.clear()

    def _open(self, peer: PrefillPeer) -> Source:
        channel = ClientChannel(peer.address, keys=self._keys, server="prefill", hello=self._hello)
        source = self._sources[peer.incarnation] = Source(peer, channel)
        source.task = asyncio.create_task(self._converse(source), name=f"source-{peer.worker_id}")
        source.task.add_done_callback(raise_in_loop)
        return source

    async def _converse(self, source: Source) -> None:
        """Shake hands, ask for what is queued, and take messages until the source is lost."""
        try:
            await self._shake_hands(source)
            for message in source.queued.values():
                self._send(source, message)
            source.queued.clear()
            while True:
                self._owner.received(source, await source.channel.receive())
        except TransferError as error:
            is_final = isinstance(error, HandshakeError)
            self._prewarming.failed(source.incarnation, self._clock(), is_final=is_final)
            self._lose(source, str(error), is_refusal=is_final)
            self._prewarm()

    def _lose(self, source: Source, reason: str, *, is_refusal: bool = False) -> None:
        if self._sources.get(source.incarnation) is not source:
            return
        del self._sources[source.incarnation]
        if not is_refusal:
            log.log(
                level_of_loss(reason),
                "event=source_lost source=%s reason=%s",
                source.worker_id,
                reason,
            )
        elif self._refusals.add(source.incarnation, reason, self._clock()):
            log.error("event=refused source=%s reason=%s", source.worker_id, reason)
        source.channel.close()
        self._owner.lost(source, reason)

    def _prewarm(self) -> None:
        """Pair with whom it is time to, and come back when it is time for the next one."""
        now = self._clock()
        for peer in self._prewarming.due(now):
            if peer.incarnation not in self._sources:
                self._open(peer)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self._prewarming.next_at()) is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._prewarm)

    async def _shake_hands(self, source: Source) -> None:
        started = self._clock()
        welcome = await source.channel.connect()
        if welcome.incarnation != source.incarnation:
            raise PeerLostError(f"{source.worker_id} was restarted as {welcome.incarnation}")
        seconds = self._clock() - started
        self._owner.paired(source, welcome, seconds=seconds)
        source.is_connected = True
        log.info("event=paired source=%s seconds=%.3f", source.worker_id, seconds)

    def _send(self, source: Source, message: Prefill) -> None:
        self._owner.asking(source, message)
        source.channel.send(message)
