"""The file by which commands of this user find the deployment that runs in a private session.

It holds the session's address and key, so only its owner may read it, and its API's URL.
"""

import json
import logging
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from core.errors import ConfigError
from deploy.model_source import cache_folder

log = logging.getLogger(__name__)

OWNER_ONLY = 0o600
LOOK_S = 0.05
"""Between two looks for the end of a process."""


@dataclass(frozen=True, slots=True)
class RunningSession:
    """How to join a session."""

    address: str
    token: str
    pid: int
    """Of the driver: a file that a killed one left behind names nobody."""
    url: str | None = None
    """Of the API; None: its router runs elsewhere."""

    def driver(self) -> psutil.Process | None:
        """Return the driver, to be told from a later process of its pid; None: it has ended."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid)
        return None


def run_file(name: str) -> Path:
    """Return where the deployment called ``name`` leaves its file."""
    return cache_folder() / "run" / f"{name}.json"


@contextmanager
def announced(name: str, session: RunningSession) -> Generator[None]:
    """Leave the file for the time of the ``with`` block; the latest deployment of a name wins.

    Where an earlier one still runs, a warning says that commands do not reach that any more.
    Where it cannot be written, such as in a read-only home, a warning says what does not work.
    """
    path = run_file(name)
    try:
        _warn_of_other(name)
        _write(path, session)
    except OSError as error:
        log.warning(
            "event=not_findable reason=%s: commands without --url will not find this deployment; "
            "for that, let SLUICE_CACHE name a folder that can be written",
            error,
        )
        yield
        return
    try:
        yield
    finally:
        if find_session(name) == session:
            path.unlink(missing_ok=True)


def _warn_of_other(name: str) -> None:
    with suppress(ConfigError):  # what cannot be read is written anew
        if (other := find_session(name)) is not None:
            log.warning(
                "event=name_shared name=%s pid=%d reason=it runs here, too, and commands without "
                "--url will reach this deployment only; give each a deploy.name",
                *(name, other.pid),
            )


def _write(path: Path, session: RunningSession) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_suffix(f".{session.pid}")
    try:
        with os.fdopen(
            os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, OWNER_ONLY), "w"
        ) as file:
            json.dump(asdict(session), file)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)  # half of it, on a full disk
        raise


def find_session(name: str) -> RunningSession | None:
    """Return the private session of the deployment called ``name``; None: there is none.

    Raises:
        ConfigError: the file is not one of ours.
    """
    path = run_file(name)
    try:
        session = RunningSession(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be used ({error}); remove it") from error
    return session if Path(f"/proc/{session.pid}").exists() else None


def running_here() -> dict[str, RunningSession]:
    """Return this user's deployments that run in private sessions by their names, sorted."""
    sessions: dict[str, RunningSession] = {}
    for path in sorted(run_file("*").parent.glob("*.json")):
        with suppress(ConfigError):  # whoever names it is told what is wrong with it
            if (session := find_session(path.stem)) is not None:
                sessions[path.stem] = session
    return sessions


def wait_end(driver: psutil.Process, timeout_s: float) -> bool:
    """Return whether ``driver`` has ended within ``timeout_s``.

    Its parent need not have heard of it. Looks again and again: before Linux 5.3 nothing tells of
    the end of what is no child.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while driver.is_running() and driver.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_S)
    except psutil.NoSuchProcess:
        pass
    return True


def url_here() -> str | None:
    """Return the URL of the API that this user serves on this machine; None: none is known.

    Raises:
        ConfigError: there are several.
    """
    urls = {name: session.url for name, session in running_here().items() if session.url}
    if len(urls) > 1:
        told = ", ".join(f"{name} at {url}" for name, url in urls.items())
        raise ConfigError(f"several deployments run here: {told}; give --url of one")
    return next(iter(urls.values()), None)
