"""The channel from the router to one life of one decode worker."""

import logging

from core.channel import ChannelKeys, ClientChannel
from core.errors import HandshakeError
from core.ids import Attempt, Incarnation, RequestId, WorkerId
from core.messages import AnyMessage, Failed, Generate, Heartbeat, Hello, Output
from core.sampling import SamplingParams

log = logging.getLogger(__name__)


class DecodeLink:
    """Sends requests to one incarnation of a decode worker and proves that it answers.

    A link is never reconnected. Before the worker gets requests it must have generated one token,
    since a process that reports and connects may still be unable to generate.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        *,
        keys: ChannelKeys,
        router: Incarnation,
        silence_s: float,
        probe_token_id: int,
    ) -> None:
        self.worker_id: WorkerId = heartbeat.worker_id
        self.incarnation: Incarnation = heartbeat.incarnation
        self._probe_id = RequestId(f"probe-{router}-{heartbeat.incarnation}")
        self._probe_token_id = probe_token_id
        self._probe_attempt = 0
        self._is_probing = False
        self.is_connected = False
        """Before, what is sent goes nowhere."""
        self._channel = ClientChannel(
            heartbeat.address,
            keys=keys,
            server="decode",
            hello=Hello(name="router", incarnation=router),
            silence_s=silence_s,
        )

    async def connect(self) -> None:
        """Connect and send the probe.

        Raises:
            HandshakeError: the worker refuses routers like this one.
            PeerLostError: nothing answers, or another life of the worker does.
        """
        welcome = await self._channel.connect()
        if welcome.incarnation != self.incarnation:
            raise HandshakeError(
                f"{self.worker_id} at {self._channel.address} is {welcome.incarnation}, "
                f"not {self.incarnation}"
            )
        self.is_connected = True
        self.probe()

    def probe(self) -> None:
        """Ask for one token, unless that was asked and not answered yet."""
        if self._is_probing or not self.is_connected:
            return
        self._is_probing = True
        self._probe_attempt += 1
        self.send(
            Generate(
                request_id=self._probe_id,
                attempt=Attempt(self._probe_attempt),
                prompt_token_ids=(self._probe_token_id,),
                sampling=SamplingParams(seed=0, max_tokens=1, temperature=0.0),
            )
        )

    def is_probe(self, message: Output | Failed) -> bool:
        """Whether ``message`` is about the probe; a failed probe may be sent again."""
        if message.request_id != self._probe_id:
            return False
        if isinstance(message, Failed):
            self._is_probing = False
            log.warning("worker=%s probe=failed reason=%s", self.worker_id, message.reason)
        return True

    def send(self, message: AnyMessage) -> None:
        """Queue ``message``; lost if the worker is."""
        self._channel.send(message)

    async def receive(self) -> AnyMessage:
        """Return the worker's next message.

        Raises:
            PeerLostError: the worker is gone.
        """
        return await self._channel.receive()

    def close(self) -> None:
        """Close at once."""
        self._channel.close()
