"""The channels of a decode worker to the prefill workers that it reads from."""

import asyncio
import logging
from typing import Protocol

from core.channel import ChannelKeys, ClientChannel
from core.errors import PeerLostError, TransferError
from core.ids import Incarnation, Owner, WorkerId
from core.messages import AnyMessage, Hello, Prefill, PrefillPeer, Welcome
from core.tasks import raise_in_loop

log = logging.getLogger(__name__)


class Source:
    """One life of one prefill worker."""

    def __init__(self, peer: PrefillPeer, channel: ClientChannel) -> None:
        self.worker_id: WorkerId = peer.worker_id
        self.incarnation: Incarnation = peer.incarnation
        self.channel = channel
        self.is_connected = False
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

    def asking(self, source: Source, message: Prefill) -> None:
        """``message`` is about to be sent."""
        ...

    def received(self, source: Source, message: AnyMessage) -> None:
        """``source`` has sent ``message``."""
        ...

    def lost(self, source: Source, reason: str) -> None:
        """Nothing more comes of ``source``; what is still queued was never asked for."""
        ...


class Sources:
    """Opens a channel to a prefill worker when it is first asked. Belongs to one event loop."""

    def __init__(self, keys: ChannelKeys, hello: Hello, owner: SourcesOwner) -> None:
        self._keys = keys
        self._hello = hello
        self._owner = owner
        self._clock = asyncio.get_running_loop().time
        self._sources: dict[Incarnation, Source] = {}

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
        source = self._sources.get(peer.incarnation) or self._open(peer)
        if source.is_connected:
            self._send(source, message)
        else:
            source.queued[message.request_id, message.attempt] = message

    def withdraw(self, owner: Owner) -> None:
        """Do not ask for ``owner``, if that has not been done yet."""
        for source in self._sources.values():
            source.queued.pop(owner, None)

    def close(self) -> None:
        """Close every channel; nobody is told."""
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
            log.warning("event=source_lost source=%s reason=%s", source.worker_id, error)
            self._sources.pop(source.incarnation, None)
            source.channel.close()
            self._owner.lost(source, str(error))

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
