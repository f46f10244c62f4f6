"""A worker's standing report to one router: ready, where, and how loaded; answers to questions."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from core.channel import ChannelKeys, ClientChannel
from core.errors import HandshakeError, PeerLostError
from core.ids import Incarnation, WorkerId
from core.messages import AnyMessage, Heartbeat, Hello
from core.tasks import raise_in_loop

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 1.0
LOSS_TOLD_EACH_S = 15.0
"""While a router is away; it is looked for far more often."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """What every router is told, and by whom."""

    keys: ChannelKeys
    worker_id: WorkerId
    incarnation: Incarnation
    drain: asyncio.Event
    heartbeat: Callable[[], Heartbeat]
    answer: Callable[[AnyMessage], Awaitable[AnyMessage | None]]


class RouterLink:
    """Reports each second; a lost router is looked for again."""

    def __init__(self, address: str, reporter: Reporter) -> None:
        self._address = address
        self._reporter = reporter
        self._hello = Hello(name=reporter.worker_id, incarnation=reporter.incarnation)
        self.is_connected = False
        """Whether the router has taken this worker."""
        self._loss_told_at: float | None = None
        """None: it was connected since."""

    async def run(self) -> None:
        """Report until cancelled.

        Raises:
            HandshakeError: the router refused this worker; another try does not help.
        """
        while True:
            channel = ClientChannel(
                self._address, keys=self._reporter.keys, server="router", hello=self._hello
            )
            try:
                await channel.connect()
                log.info("event=connected router=%s", self._address)
                self.is_connected, self._loss_told_at = True, None
                await self._report_over(channel)
            except HandshakeError:
                raise
            except PeerLostError as error:
                self.is_connected = False
                self._tell_loss(error)
                await asyncio.sleep(HEARTBEAT_INTERVAL_S / 2)
            finally:
                self.is_connected = False
                channel.close()

    def _tell_loss(self, error: PeerLostError) -> None:
        now = time.monotonic()
        if self._loss_told_at is None or now - self._loss_told_at >= LOSS_TOLD_EACH_S:
            self._loss_told_at = now
            log.warning("event=lost router=%s reason=%s", self._address, error)

    async def _report_over(self, channel: ClientChannel) -> None:
        """Report until the channel is lost."""
        listening = asyncio.create_task(self._answer_all(channel))
        draining = asyncio.create_task(self._reporter.drain.wait())
        try:
            while not listening.done():
                channel.send(self._reporter.heartbeat())
                # That a drain began is told at once; after that there is no more such news.
                news = {listening} if draining.done() else {listening, draining}
                await asyncio.wait(
                    news, timeout=HEARTBEAT_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
                )
            listening.result()
        finally:
            listening.cancel()
            draining.cancel()

    async def _answer_all(self, channel: ClientChannel) -> None:
        """Answer the router's questions until the channel is lost; one holds up no other."""
        answers: set[asyncio.Task[None]] = set()
        try:
            while True:
                answer = asyncio.create_task(self._answer_one(channel, await channel.receive()))
                answers.add(answer)
                answer.add_done_callback(answers.discard)
                answer.add_done_callback(raise_in_loop)
        finally:
            for answer in answers:
                answer.cancel()

    async def _answer_one(self, channel: ClientChannel, question: AnyMessage) -> None:
        answer = await self._reporter.answer(question)
        if answer is not None:
            channel.send(answer)
