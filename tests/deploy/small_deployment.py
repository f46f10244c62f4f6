"""A deployment of three idle services, run as a program: what ``sluice serve`` is, less the model.

Being ``__main__``, its service class reaches the actors by value. Prints one JSON line per event,
so that a test can follow and disturb it from outside.
"""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from core.config import DeployConfig  # noqa: E402
from core.errors import ConfigError  # noqa: E402
from core.ids import Incarnation  # noqa: E402
from deploy.cluster.environment import prepare_ray_environment  # noqa: E402

CONFIG = DeployConfig(
    stop_timeout_s=float(os.environ.get("STOP_TIMEOUT_S", "7")),
    progress_timeout_s=float(os.environ.get("PROGRESS_TIMEOUT_S", "60")),
)
if __name__ == "__main__":  # whoever imports it has a cluster, or other tests in its process
    prepare_ray_environment(CONFIG)

from core.lifecycle import Lifecycle, Work  # noqa: E402
from core.messages import Party  # noqa: E402
from deploy.cluster.session import RaySession, ray_session  # noqa: E402
from deploy.supervision import actors  # noqa: E402
from deploy.supervision.events import EventQueue, StopRequested  # noqa: E402
from deploy.supervision.launch import Launch  # noqa: E402
from deploy.supervision.placement import Bundle  # noqa: E402
from deploy.supervision.service_names import role_of  # noqa: E402
from deploy.supervision.stop_signals import StopSignals  # noqa: E402
from deploy.supervision.supervisor import Supervisor  # noqa: E402

LOADING_S = 600.0
_showing = threading.Lock()


@dataclass(frozen=True)
class IdleService:
    """Does nothing until it is stopped, or shows one of the ways to go wrong."""

    name: str
    behaviour: str = "obey"
    log_level: str = "warning"
    log_format: str = "text"

    revision: str = "a"

    @property
    def role(self) -> Party:
        return role_of(self.name)

    async def run(self, lifecycle: Lifecycle) -> None:
        if self.behaviour == "load":
            threading.Event().wait(LOADING_S)  # its event loop hears nothing meanwhile
        if self.behaviour == "misconfigured":
            raise ConfigError("cache.num_blocks: none fits")
        if self.behaviour == "crash":
            actors.LAST_WORDS_S = LOADING_S  # whoever is to hear them may be slow
            raise ValueError("no kernel\nfor this model")
        await lifecycle.run(Work(Incarnation(1), is_idle=lambda: True))
        if self.behaviour == "hang":
            await asyncio.Event().wait()


@dataclass(frozen=True)
class IdlePlan:
    """A router and decode workers that do nothing."""

    behaviours: tuple[str, ...]
    deploy: DeployConfig = CONFIG
    revision_of_all: str = "a"
    log_level: str = "info"
    log_format: str = "text"

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(ROOT)}

    def replicas(self) -> dict[Party, int]:
        return {"router": 1, "decode": len(self.behaviours) - 1}

    def revision(self, _role: Party) -> str:
        return self.revision_of_all

    def launch(self, role: Party, name: str) -> Launch:
        index = 0 if role == "router" else 1 + int(name.rpartition("-")[2])
        behaviour = self.behaviours[index] if index < len(self.behaviours) else "obey"
        service = IdleService(name, behaviour, revision=self.revision_of_all)
        asked = {"none": 1.0} if behaviour == "no_room" else {}
        return Launch(service, Bundle(asked), self.environment)

    def advice(self, _replicas: Mapping[Party, int]) -> str:
        return ""

    def updated(self, config: str) -> "IdlePlan":
        return replace(self, revision_of_all=config)


def show(**fields: object) -> None:
    with _showing:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


@contextmanager
def telling_when_ready(supervisor: Supervisor, number: int) -> Iterator[None]:
    """Show, once, that the controller has heard of the health of all services."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.2):
            if [row.state for row in supervisor.services()] == ["ready"] * number:
                show(event="AllReady")
                return

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        is_over.set()
        looking.join()  # a call into Ray while it is shut down would end this process by a signal


def follow(supervisor: Supervisor, session: RaySession) -> None:
    """Show what happens, until a stop is asked for."""
    while True:
        event = supervisor.next_event()
        session.on_new_process()
        show(event=type(event).__name__, **asdict(event))
        if isinstance(event, StopRequested):
            return


def main() -> int:
    events = EventQueue()
    signals = StopSignals(events)
    plan = IdlePlan(tuple(sys.argv[1:] or ["obey", "obey", "obey"]))
    with signals.installed(), ray_session(CONFIG, signals.ending_all) as session:
        signals.install()
        supervisor = Supervisor(plan, events, private=True)
        try:
            supervisor.start()
            telling = telling_when_ready(supervisor, len(plan.behaviours))
            with telling if "TELL_READY" in os.environ else nullcontext():
                follow(supervisor, session)
        except ConfigError as error:
            show(event="ConfigError", error=str(error))
        finally:
            supervisor.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
