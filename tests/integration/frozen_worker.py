# ruff: noqa: PLC0415 - torch is loaded in the worker's process only
"""A real decode worker in a process of its own, whose engine can be made to stand still.

The adversary is its runner: the real one behind a gate that a step waits at, as at a device that
hangs. It runs in a ``ServiceActor``, which is asked as the controller asks it.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from core.ids import new_incarnation
from core.lifecycle import Lifecycle
from core.logs import LogFormat
from core.messages import Party
from core.worker_context import WorkerContext
from deploy.supervision.actors import ServiceActor

if TYPE_CHECKING:
    from engine.batch import StepBatch
    from engine.executor import LaunchedStep, StepRunner

HELD_S = 60.0
"""A gate that is forgotten opens."""


class GatedRunner:
    """The real runner; a step that comes to a closed gate waits there, in the engine's thread."""

    def __init__(self, runner: "StepRunner", gate: threading.Event) -> None:
        self._runner = runner
        self._gate = gate

    @property
    def is_asynchronous(self) -> bool:
        return self._runner.is_asynchronous

    def launch(self, batch: "StepBatch", on_layers: Callable[[int], None]) -> "LaunchedStep":
        self._gate.wait(HELD_S)
        return self._runner.launch(batch, on_layers)

    def drain(self) -> None:
        self._runner.drain()


@dataclass(frozen=True)
class GatedService:
    """What ``run_decode`` does, with a gate."""

    context: WorkerContext
    gate: threading.Event
    name: str = "decode-0"
    role: Party = "decode"
    revision: str = "a"
    log_level: str = "warning"
    log_format: LogFormat = "text"

    async def run(self, lifecycle: Lifecycle) -> None:
        from decode.worker import DecodeWorker
        from ranks.leader import Ranks

        incarnation = new_incarnation()
        ranks = await Ranks.start(self.context, "decode", incarnation=incarnation)
        ranks.engine = replace(ranks.engine, runner=GatedRunner(ranks.engine.runner, self.gate))
        worker = DecodeWorker(self.context, ranks, incarnation, lifecycle)
        try:
            await worker.serve()
        finally:
            await worker.close()
            await ranks.close()


def run(context: WorkerContext, orders: Connection) -> None:
    """Obey until ``stop``, and answer each order."""
    gate = threading.Event()
    gate.set()
    actor = ServiceActor(GatedService(context, gate))
    while (order := orders.recv()) != "stop":
        if order == "health":
            orders.send(actor.health())
        elif order == "close":
            gate.clear()
            orders.send(None)
        elif order == "open":
            gate.set()
            orders.send(None)
    gate.set()
    actor.stop()
    orders.send(actor.wait_end(30.0))
