"""The Ray actor that every process of a deployment is: one coroutine in a loop of its own."""

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import ray
import uvloop
from ray.actor import ActorHandle

from core.errors import ConfigError, MemoryCorruptionError
from core.lifecycle import Lifecycle, WorkerHealth
from core.logs import LogFormat, set_up_logging
from core.messages import DesiredWorkers, Party
from core.parent import die_with_parent
from core.version import VERSION
from deploy.cluster.ray_errors import on_one_line
from deploy.supervision.events import ProcessIdentity
from deploy.supervision.sentinel import outlive_not

log = logging.getLogger(__name__)

EXIT_CRASHED = 1
LAST_WORDS_S = 1.0
"""For the controller to hear what a crash is. It kills the process as soon as it has."""


class Service(Protocol):
    """What an actor runs. Pickled for every start."""

    @property
    def name(self) -> str:
        """Of the actor, in logs and in Ray."""
        ...

    @property
    def log_level(self) -> str:
        """Of the process."""
        ...

    @property
    def log_format(self) -> LogFormat:
        """Of the process."""
        ...

    @property
    def role(self) -> Party:
        """What it serves as."""
        ...

    @property
    def revision(self) -> str:
        """Short name of what it runs by."""
        ...

    def run(self, lifecycle: Lifecycle) -> Coroutine[Any, Any, None]:
        """Serve until ``stop`` or the end of a drain.

        A ``ConfigError`` is final; anything else is a crash.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ending:
    """The service has ended as it was told, or, with an error, for good."""

    error: str | None
    """The config error that no restart can mend, or what the crash is."""
    is_crash: bool = False
    """The process is about to end, and only waits for this to be heard."""


class ServiceActor:
    """Runs one service from its construction on.

    The service has a thread and an event loop of its own; Ray's calls come on other threads and
    only set or await events. A crash ends the process: that, and not an exception, is what Ray
    takes for a death, which the controller answers with a new actor. Ray tells a crash by its exit
    code alone, so that ``wait_end`` says before what it is. No method is a coroutine:
    one alone would have Ray run all calls one after another, each behind those that wait.

    With a ``sentinel``, it ends when that is gone: see ``deploy.supervision.sentinel``.
    """

    def __init__(
        self,
        service: Service,
        sentinel: ActorHandle[Any] | None = None,
        version: str = VERSION,
    ) -> None:
        """Args: ``version``, of the code that made ``service``; another may misread it."""
        die_with_parent()
        set_up_logging(
            service.log_level,
            worker=service.name,
            role=service.role,
            log_format=service.log_format,
        )
        self._service = service
        self._version = version
        self._error: str | None = None
        self._is_crash = False
        self._ended = threading.Event()
        self._loop = uvloop.new_event_loop()
        self._lifecycle = Lifecycle()
        threading.Thread(target=self._run, name=service.name, daemon=True).start()
        if sentinel is not None:
            outlive_not(sentinel, self._exit)

    def __repr__(self) -> str:
        return self._service.name  # Ray puts it before each line of the process's output

    def identity(self) -> ProcessIdentity:
        """Return who runs; answers as soon as the process is up."""
        service = self._service
        return ProcessIdentity(
            pid=os.getpid(),
            host=socket.gethostname(),
            name=service.name,
            role=service.role,
            revision=service.revision,
        )

    def health(self, desired: DesiredWorkers | None = None) -> WorkerHealth:
        """Return how the service is, and take what it is to tell routers: see ``DesiredWorkers``.

        Answers though its event loop stands still.
        """
        if desired is not None:
            self._lifecycle.hear(desired)
        return self._lifecycle.health()

    def expect_stop(self) -> None:
        """Log errors alone from now on: that peers end is no news while all are stopped."""
        logging.getLogger().setLevel(logging.ERROR)

    def stop(self) -> None:
        """Ask the service to end. Returns at once; ``wait_end`` tells when it has."""
        self._loop.call_soon_threadsafe(self._lifecycle.stop.set)

    def drain(self) -> None:
        """Have the service take nothing new and end when it has nothing left. Returns at once."""
        self._loop.call_soon_threadsafe(self._lifecycle.drain.set)

    def wait_end(self, timeout_s: float) -> Ending | None:
        """Return how the service has ended, as soon as it has; None: not within ``timeout_s``."""
        return Ending(self._error, self._is_crash) if self._ended.wait(timeout_s) else None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._refuse_other_version()
            self._loop.run_until_complete(self._service.run(self._lifecycle))
        except ConfigError as error:
            self._error = str(error)
        except MemoryCorruptionError as error:
            # The stack is that of the victim: the line names the writer.
            log.critical("event=crashed service=%s reason=%s", self._service.name, error)
            self._exit()
        except BaseException as error:
            log.exception("event=crashed service=%s", self._service.name)
            self._crash(f"{type(error).__name__}: {on_one_line(error)}")
        was_told = self._lifecycle.stop.is_set() or self._lifecycle.drain.is_set()
        if self._error is None and not was_told:
            log.error("event=ended_untold service=%s", self._service.name)
            self._crash("it ended though nobody told it to")
        self._ended.set()

    def _crash(self, reason: str) -> None:
        """Say why to whoever waits for the end, and end the process: at once when it is killed."""
        self._error, self._is_crash = reason, True
        self._ended.set()
        time.sleep(LAST_WORDS_S)
        self._exit()

    def _refuse_other_version(self) -> None:
        if self._version != VERSION:
            raise ConfigError(
                f"this node has Sluice {VERSION}, and the controller {self._version}: a deployment "
                "runs one version; give all nodes the same image and start it anew (in the chart: "
                "ray.upgradeStrategy=Recreate)"
            )

    @staticmethod
    def _exit() -> None:
        logging.shutdown()
        os._exit(EXIT_CRASHED)


# Threads: one blocked in ``wait_end`` per watcher, one for each short call.
RemoteServiceActor = ray.remote(max_concurrency=8)(ServiceActor)
