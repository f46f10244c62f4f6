"""The workers that report to this router, and the links to those that decode.

A shell around ``WorkerRegistry``: it feeds heartbeats, link events and the clock in, and keeps one
``DecodeLink`` for each living decode worker.
"""

import asyncio
import logging
import math
from collections import Counter
from typing import Protocol

from core.channel import ChannelKeys, ClientLost, ServerChannel
from core.config import SluiceConfig
from core.errors import HandshakeError, TransferError
from core.ids import Incarnation, WorkerId, new_incarnation
from core.lifecycle import Lifecycle
from core.messages import (
    AnyMessage,
    CacheReport,
    DesiredWorkers,
    Failed,
    Heartbeat,
    Output,
    OutputBatch,
    Peers,
    TraceReport,
    Welcome,
)
from core.trace import Recorder
from router.cache_control import CacheControl
from router.links import DecodeLink
from router.metrics import RouterMetrics
from router.registry import Change, Worker, WorkerRegistry
from router.trace_control import TraceControl

log = logging.getLogger(__name__)

MIN_EXPIRY_WAIT_S = 0.02


def _level_of_loss(worker: Worker | None) -> int:
    """Return how loud a worker's end is told: that of one which has drained is no trouble."""
    has_drained = worker is not None and worker.is_draining
    return logging.INFO if has_drained else logging.WARNING


class FleetListener(Protocol):
    """Who wants to know what the decode workers say."""

    def on_output(self, link: DecodeLink, output: Output) -> None:
        """Take the next tokens of one attempt."""
        ...

    def on_failed(self, link: DecodeLink, failed: Failed) -> None:
        """Take the end of one attempt."""
        ...

    def on_link_lost(self, link: DecodeLink) -> None:
        """Give up all that runs on ``link``."""
        ...


class Fleet:
    """Owned by one event loop; ``run`` lives as long as the router."""

    def __init__(
        self,
        config: SluiceConfig,
        *,
        host: str,
        control_port: int,
        keys: ChannelKeys,
        metrics: RouterMetrics,
        probe_token_id: int,
        recorder: Recorder,
        lifecycle: Lifecycle,
    ) -> None:
        """Listen for workers on ``host``.

        Raises:
            ConfigError: the port is taken.
        """
        self.registry = WorkerRegistry(silence_s=config.router.worker_silence_s)
        self._silence_s = config.router.worker_silence_s
        self._keys = keys
        self._metrics = metrics
        self._lifecycle = lifecycle
        metrics.controller_silence.set_function(self._shown_controller_silence_s)
        self._probe_token_id = probe_token_id
        self.incarnation: Incarnation = new_incarnation()
        self._links: dict[WorkerId, DecodeLink] = {}
        self._lives: dict[WorkerId, Incarnation] = {}
        self._peers = Peers(prefill=())
        self._refused: dict[WorkerId, Incarnation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._listener: FleetListener | None = None
        self._control = ServerChannel(
            host=host,
            port=control_port,
            keys=keys,
            incarnation=self.incarnation,
            welcome=lambda _client, _hello: Welcome(
                worker_id=WorkerId("router"), incarnation=self.incarnation
            ),
            silence_s=self._silence_s,
        )
        self._control.rejects.export(metrics.registry)
        self.address = self._control.address
        self.caches = CacheControl(self._control.send, incarnation=self.incarnation)
        self.traces = TraceControl(self._control.send, recorder, incarnation=self.incarnation)

    async def run(self, listener: FleetListener) -> None:
        """Keep registry and links up to date until cancelled; then close everything."""
        self._listener = listener
        self._count_workers()  # none: told at once, and not only when the first one has come
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._receive_reports())
                group.create_task(self._forget_silent())
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._control.close()

    def link(self, worker: Worker) -> DecodeLink | None:
        """Return the link to this life of the worker, if one leads there.

        A worker that has proven itself before is usable as soon as it reports again, when the new
        link has not been connected yet: ``changed`` tells of that, too.
        """
        link = self._links.get(worker.worker_id)
        if link is None or link.incarnation != worker.incarnation or not link.is_connected:
            return None
        return link

    async def changed(self) -> None:
        """Wait for the next heartbeat, proof or loss of any worker."""
        await self._changed.wait()

    def max_model_len(self) -> int | None:
        """Return the least that a living decode worker takes; None without one."""
        return min(
            (w.heartbeat.max_model_len for w in self.registry.workers("decode")), default=None
        )

    async def _receive_reports(self) -> None:
        while True:
            client, message = await self._control.receive()
            if isinstance(message, Heartbeat) and message.role == self._control.party(client):
                self._observe(message)
                if self.registry.is_current(message):
                    self.caches.heard(client, message)
                    self.traces.heard(client, message)
            elif self._is_answer(message):
                continue
            elif not isinstance(message, ClientLost):
                self._metrics.stale_messages.labels(message=type(message).__name__).inc()

    def _is_answer(self, message: AnyMessage | ClientLost) -> bool:
        """Whether somebody waits for ``message``, and now has it."""
        if isinstance(message, CacheReport):
            return self.caches.take(message)
        return isinstance(message, TraceReport) and self.traces.take(message)

    def _observe(self, heartbeat: Heartbeat) -> None:
        now_s = asyncio.get_running_loop().time()
        change = self.registry.observe(heartbeat, now_s=now_s)
        if change is not Change.NONE:
            self._count_life(heartbeat)
            log.info(
                "event=worker_%s worker=%s role=%s incarnation=%s address=%s",
                change.name.lower(),
                heartbeat.worker_id,
                heartbeat.role,
                heartbeat.incarnation,
                heartbeat.address,
            )
        worker = self.registry.get(heartbeat.worker_id)
        if heartbeat.role == "decode" and worker is not None:
            self._keep_linked(worker)
        self._notify()

    def _count_life(self, heartbeat: Heartbeat) -> None:
        """Count a process that has taken the place of an earlier one."""
        worker_id, incarnation = heartbeat.worker_id, heartbeat.incarnation
        if self._lives.get(worker_id, incarnation) != incarnation:
            self._metrics.worker_restarts.labels(role=heartbeat.role).inc()
        self._lives[worker_id] = incarnation

    def _keep_linked(self, worker: Worker) -> None:
        link = self._links.get(worker.worker_id)
        if link is not None and link.incarnation != worker.incarnation:
            self._drop(link, reason="another incarnation reported")
            link = None
        if link is not None:
            if not worker.proven:
                link.probe()
            return
        if self._refused.get(worker.worker_id) == worker.incarnation:
            return
        link = DecodeLink(
            worker.heartbeat,
            keys=self._keys,
            router=self.incarnation,
            silence_s=self._silence_s,
            probe_token_id=self._probe_token_id,
        )
        self._links[worker.worker_id] = link
        task = asyncio.create_task(self._serve(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, link: DecodeLink) -> None:
        """Receive from one decode worker until it is lost."""
        reason = "router stops"
        try:
            await link.connect()
            link.send(self._peers)
            self._notify()
            while True:
                self._handle(link, await link.receive())
        except HandshakeError as error:
            self._refused[link.worker_id] = link.incarnation
            reason = str(error)
        except TransferError as error:
            reason = str(error)
        except Exception:
            reason = "unexpected error"
            log.exception("event=link_failed worker=%s", link.worker_id)
        finally:
            self._drop(link, reason=reason)

    def _handle(self, link: DecodeLink, message: AnyMessage) -> None:
        assert self._listener is not None, "run sets it before any link exists"
        if isinstance(message, OutputBatch):
            for output in message.outputs:
                if link.is_probe(output):
                    self.registry.prove(link.worker_id, link.incarnation)
                    self._notify()
                else:
                    self._listener.on_output(link, output)
        elif isinstance(message, Failed):
            if not link.is_probe(message):
                self._listener.on_failed(link, message)
        else:
            self._metrics.stale_messages.labels(message=type(message).__name__).inc()

    def _drop(self, link: DecodeLink, *, reason: str) -> None:
        """Close ``link`` and give up what runs on it; a second call does nothing."""
        link.close()
        if self._links.get(link.worker_id) is not link:
            return
        del self._links[link.worker_id]
        worker = self.registry.lose(link.worker_id, link.incarnation)
        log.log(
            _level_of_loss(worker),
            "event=link_lost worker=%s incarnation=%s reason=%s",
            link.worker_id,
            link.incarnation,
            reason,
        )
        if worker is not None:
            self._forget_cache(worker)
        if self._listener is not None:
            self._listener.on_link_lost(link)
        self._notify()

    def _forget_cache(self, worker: Worker) -> None:
        """A worker that is gone keeps its cache, as far as is known, unless it has drained."""
        if worker.is_draining:
            self.caches.forget(worker.worker_id, worker.incarnation)

    async def _forget_silent(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            expiry_s = self.registry.next_expiry_s()
            wait_s = None if expiry_s is None else max(expiry_s - loop.time(), MIN_EXPIRY_WAIT_S)
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                await self._catch_up()
                self._expire(loop.time())

    async def _catch_up(self) -> None:
        """Return when reports are read that came while this loop, or the machine, stood still."""
        loop = asyncio.get_running_loop()
        is_late = True
        while is_late:
            due_s = loop.time() + MIN_EXPIRY_WAIT_S
            await asyncio.sleep(MIN_EXPIRY_WAIT_S)
            is_late = loop.time() > due_s + self._silence_s / 4

    def _expire(self, now_s: float) -> None:
        for worker in self.registry.expire(now_s=now_s):
            log.log(
                _level_of_loss(worker),
                "event=worker_silent worker=%s incarnation=%s",
                worker.worker_id,
                worker.incarnation,
            )
            self._forget_cache(worker)
            link = self._links.get(worker.worker_id)
            if link is not None:
                self._drop(link, reason="no heartbeat")
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._announce()
        self._count_workers()

    def _announce(self) -> None:
        """Tell decode workers which prefill workers there are, where that has changed."""
        peers = Peers(prefill=self.registry.prefill_peers())
        if peers != self._peers:
            self._peers = peers
            for link in self._links.values():
                link.send(peers)

    def desired(self) -> DesiredWorkers | None:
        """Return the newest word of which workers are wanted; None: nobody has one."""
        return self.registry.desired(self._lifecycle.desired)

    def controller_silence_s(self) -> float | None:
        """Return how long ago the controller told anybody anything; None: nobody was ever told."""
        now_s = asyncio.get_running_loop().time()
        here_s = self._lifecycle.controller_silence_s()
        return self.registry.controller_silence_s(now_s=now_s, here_s=here_s)

    def _shown_controller_silence_s(self) -> float:
        """NaN, which no alert compares with anything, where nobody was ever told anything."""
        silence_s = self.controller_silence_s()
        return math.nan if silence_s is None else silence_s

    def _count_workers(self) -> None:
        counts: Counter[tuple[str, str]] = Counter()
        for role in ("prefill", "decode"):
            counts.update({(role, state): 0 for state in ("starting", "ready", "draining")})
            for worker in self.registry.workers(role):
                state = worker.heartbeat.state if worker.proven else "starting"
                counts[role, state] += 1
        for (role, state), count in counts.items():
            self._metrics.workers.labels(role=role, state=state).set(count)
        desired = self.desired()
        # Kept when the last worker is gone: that is what an alert has to know of.
        if desired is not None:
            self._metrics.workers_desired.labels(role="prefill").set(desired.prefill)
            self._metrics.workers_desired.labels(role="decode").set(desired.decode)
