"""A worker that speaks the real protocol over real channels and does what a test tells it.

It is an adversary, not a model: it can die, freeze, fail, repeat itself, or send what belongs to
an attempt that is over. What it sends as text is the script's, cut into one token per output.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from core.channel import ClientChannel, ClientId, ClientLost, DeploymentKeys, ServerChannel
from core.errors import PeerLostError
from core.ids import Incarnation, WorkerId, new_incarnation
from core.messages import (
    Abort,
    AnyMessage,
    CacheReport,
    CacheState,
    DesiredWorkers,
    Failed,
    FinishReason,
    Generate,
    Heartbeat,
    Hello,
    Output,
    OutputBatch,
    Peers,
    RequestStats,
    ResetCache,
    Role,
    ShowCache,
    ShowTrace,
    TraceReport,
    Welcome,
    WorkerLoad,
)
from core.sampling import TokenLogprobs
from core.trace import Recorder

Script = Callable[["ScriptedWorker", Generate], Awaitable[None]]


@dataclass
class ScriptedWorker:
    """One life of one worker. ``script`` runs for each request but the router's probe."""

    worker_id: str
    router_address: str
    keys: DeploymentKeys
    script: Script
    role: Role = "decode"
    load: WorkerLoad = field(default_factory=lambda: WorkerLoad(free_blocks=100, total_blocks=100))
    max_model_len: int = 512
    answers_probes: bool = True
    desired: DesiredWorkers | None = None
    controller_silence_s: float | None = None
    heartbeat_interval_s: float = 0.1
    incarnation: Incarnation = field(default_factory=new_incarnation)
    generates: list[Generate] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    peers: list[Peers] = field(default_factory=list)
    seen: asyncio.Condition = field(default_factory=asyncio.Condition)
    frozen: bool = False
    state: str = "ready"
    """That it reports."""
    cache_state: CacheState | None = None
    """None: does not answer what the router asks of its cache."""
    recorder: Recorder | None = None
    """None: does not answer what the router asks of a request."""
    cache_questions: list[ResetCache | ShowCache] = field(default_factory=list)

    async def __aenter__(self) -> "ScriptedWorker":
        self._client: ClientId = b""
        self._server = ServerChannel(
            host="127.0.0.1",
            keys=self.keys.of(self.role),
            incarnation=self.incarnation,
            welcome=self._welcome,
        )
        self._tasks = [
            asyncio.create_task(self._report()),
            asyncio.create_task(self._listen()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """End at once, as a killed process does."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.close()
        # The authenticator's task ends in the next turn, and then stops watching descriptors which
        # a channel that is opened before that would have got anew.
        await asyncio.sleep(0)

    def send(self, message: AnyMessage) -> None:
        """Send ``message`` to the router that connected last."""
        self._server.send(self._client, message)

    def output(
        self,
        generate: Generate,
        token_ids: tuple[int, ...],
        *,
        finish: FinishReason | None = None,
        attempt: int | None = None,
    ) -> None:
        """Send tokens of a request, with logprobs if it asked for them."""
        num_top = generate.sampling.logprobs
        logprobs = tuple(
            TokenLogprobs(-0.5, tuple((token + i, -0.5 - i) for i in range(num_top or 0)))
            for token in token_ids
        )
        output = Output(
            request_id=generate.request_id,
            attempt=generate.attempt if attempt is None else attempt,  # type: ignore[arg-type]
            token_ids=token_ids,
            logprobs=() if num_top is None else logprobs,
            finish_reason=finish,
            stats=None if finish is None else RequestStats(path="local", num_cached_tokens=1),
        )
        self.send(OutputBatch((output,)))

    def fail(self, generate: Generate, kind: str, *, peer: str | None = None) -> None:
        """End a request without a result."""
        self.send(
            Failed(
                generate.request_id,
                generate.attempt,
                reason=f"scripted {kind} failure",
                kind=kind,  # type: ignore[arg-type]
                peer=None if peer is None else WorkerId(peer),
            )
        )

    async def wait_for(self, condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        """Wait until something that was received makes ``condition`` true."""
        async with asyncio.timeout(timeout_s), self.seen:
            await self.seen.wait_for(condition)

    def heartbeat(self, state: str = "ready") -> Heartbeat:
        """Return what this worker reports."""
        return Heartbeat(
            worker_id=WorkerId(self.worker_id),
            role=self.role,
            incarnation=self.incarnation,
            address=self._server.address,
            model="test-model",
            max_model_len=self.max_model_len,
            load=self.load,
            state=state,  # type: ignore[arg-type]
            desired=self.desired,
            controller_silence_s=self.controller_silence_s,
        )

    def _welcome(self, client: ClientId, _hello: Hello) -> Welcome:
        self._client = client
        return Welcome(worker_id=WorkerId(self.worker_id), incarnation=self.incarnation)

    async def _report(self) -> None:
        """Report for ever; a router that took a frozen worker for lost is connected to anew."""
        while True:
            control = ClientChannel(
                self.router_address,
                keys=self.keys.of(self.role),
                server="router",
                hello=Hello(name=self.worker_id, incarnation=self.incarnation),
            )
            try:
                await control.connect()
                await self._report_over(control)
            except PeerLostError:
                continue
            finally:
                control.close()

    async def _report_over(self, control: ClientChannel) -> None:
        lost = asyncio.create_task(self._answer_questions(control))
        try:
            while not lost.done():
                if not self.frozen:
                    control.send(self.heartbeat(self.state))
                await asyncio.wait({lost}, timeout=self.heartbeat_interval_s)
            lost.result()
        finally:
            lost.cancel()

    async def _answer_questions(self, control: ClientChannel) -> None:
        while True:
            question = await control.receive()
            if isinstance(question, ShowTrace) and self.recorder is not None and not self.frozen:
                control.send(self.trace_report(question, self.recorder))
            if not isinstance(question, ResetCache | ShowCache):
                continue
            self.cache_questions.append(question)
            if self.cache_state is not None and not self.frozen:
                control.send(self.cache_report(question.number, self.cache_state))

    def cache_report(self, number: int, state: CacheState) -> CacheReport:
        """Return the answer to question ``number``."""
        return CacheReport(number, WorkerId(self.worker_id), self.role, self.incarnation, state)

    def trace_report(self, question: ShowTrace, recorder: Recorder) -> TraceReport:
        """Return what is recorded of the request that is asked about."""
        return TraceReport(
            question.number,
            WorkerId(self.worker_id),
            self.role,
            self.incarnation,
            recorder.now(),
            recorder.events(question.request_id),
        )

    async def _listen(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                client, message = await self._server.receive()
                if isinstance(message, ClientLost) or self.frozen:
                    continue
                self._client = client
                async with self.seen:
                    self._take(message, group)
                    self.seen.notify_all()

    def _take(self, message: AnyMessage, group: asyncio.TaskGroup) -> None:
        if isinstance(message, Abort):
            self.aborts.append(message)
        elif isinstance(message, Peers):
            self.peers.append(message)
        elif isinstance(message, Generate):
            if message.request_id.startswith("probe-"):
                if self.answers_probes:
                    self.output(message, (5,), finish="length")
                return
            self.generates.append(message)
            group.create_task(self._play(message))

    async def _play(self, message: Generate) -> None:
        await self.script(self, message)


def say(token_ids: list[int], *, finish: FinishReason = "stop") -> Script:
    """Return a script that sends ``token_ids``, less what an earlier attempt sent, one by one."""

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        rest = token_ids[len(generate.output_token_ids) : generate.sampling.max_tokens]
        is_cut = len(token_ids) > generate.sampling.max_tokens
        for index, token_id in enumerate(rest):
            is_last = index == len(rest) - 1
            reason: FinishReason = "length" if is_cut else finish
            worker.output(generate, (token_id,), finish=reason if is_last else None)
            await asyncio.sleep(0)

    return script


async def silence(_worker: ScriptedWorker, _generate: Generate) -> None:
    """Never answer."""
