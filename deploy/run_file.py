"""The file by which commands of this user find the deployment that runs in a private session.

It holds the session's address and key, so only its owner may read it.
"""

import json
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from core.errors import ConfigError
from deploy.model_source import cache_folder

log = logging.getLogger(__name__)

OWNER_ONLY = 0o600


@dataclass(frozen=True, slots=True)
class RunningSession:
    """How to join a session."""

    address: str
    token: str
    pid: int
    """Of the driver: a file that a killed one left behind names nobody."""


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
            "event=not_findable reason=%s: sluice scale, update and down will not find this "
            "deployment; for that, let SLUICE_CACHE name a folder that can be written",
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
                "event=name_shared name=%s pid=%d reason=it runs here, too, and sluice scale, "
                "update and down will reach this deployment only; give each a deploy.name",
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


def running_here() -> list[str]:
    """Return the names of this user's deployments that run in private sessions, sorted."""
    names: list[str] = []
    for path in run_file("*").parent.glob("*.json"):
        with suppress(ConfigError):  # whoever names it is told what is wrong with it
            if find_session(path.stem) is not None:
                names.append(path.stem)
    return sorted(names)
