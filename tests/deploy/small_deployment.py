"""A deployment of three idle services, run as a program: what ``sluice serve`` is, less the model.

Being ``__main__``, its service class reaches the actors by value. Prints one JSON line per event,
so that a test can follow and disturb it from outside.
"""

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from core.config import DeployConfig  # noqa: E402
from core.errors import ConfigError  # noqa: E402
from deploy.ray_environment import prepare_ray_environment  # noqa: E402

CONFIG = DeployConfig(stop_timeout_s=7.0)
prepare_ray_environment(CONFIG)

from deploy.events import EventQueue, StopRequested  # noqa: E402
from deploy.placement import Bundle  # noqa: E402
from deploy.ray_session import ray_session  # noqa: E402
from deploy.stop_signals import StopSignals  # noqa: E402
from deploy.supervisor import Launch, Supervisor  # noqa: E402


@dataclass(frozen=True)
class IdleService:
    """Does nothing until it is stopped, or shows one of the ways to go wrong."""

    name: str
    behaviour: str = "obey"
    log_level: str = "warning"

    async def run(self, stop: asyncio.Event) -> None:
        if self.behaviour == "misconfigured":
            raise ConfigError("cache.num_blocks: none fits")
        await stop.wait()
        if self.behaviour == "hang":
            await asyncio.Event().wait()


def show(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> int:
    events = EventQueue()
    signals = StopSignals(events)
    behaviours = sys.argv[1:] or ["obey", "obey", "obey"]
    names = ["router", *(f"worker-{i}" for i in range(1, len(behaviours)))]
    with signals.installed(), ray_session(CONFIG, num_actors=len(names)) as session:
        signals.install()
        supervisor = Supervisor(CONFIG, events)
        try:
            supervisor.start(
                [
                    Launch(IdleService(name, how), Bundle({"CPU": 1.0}), {"PYTHONPATH": str(ROOT)})
                    for name, how in zip(names, behaviours, strict=True)
                ]
            )
            while True:
                event = supervisor.next_event()
                session.on_new_process()
                show(event=type(event).__name__, **asdict(event))
                if isinstance(event, StopRequested):
                    break
        except ConfigError as error:
            show(event="ConfigError", error=str(error))
        finally:
            supervisor.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
