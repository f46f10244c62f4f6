"""A Ray cluster for one deployment: a private one on this machine, or one that runs already.

A private session leaves nothing behind. Its processes die with this one (Ray starts them with a
parent-death signal, and each actor sets its own), and its folder is removed by us. If we are
killed, a reaper that outlives us does both.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from core.config import DeployConfig
from core.errors import ConfigError
from deploy.cluster.bounded import run_bounded
from deploy.cluster.environment import cluster_address
from deploy.cluster.processes import end_processes, with_descendants
from deploy.cluster.ray_errors import on_one_line
from deploy.cluster.reach import joined
from deploy.cluster.reaper import Reaper

PROJECT_ROOT = Path(__file__).parents[2]
PACKAGES = (
    "core",
    "blockmgr",
    "transfer",
    "engine",
    "ranks",
    "prefill",
    "decode",
    "router",
    "deploy",
)
"""That a worker's or a router's process imports."""
LOOPBACK = "127.0.0.1"
SHUTDOWN_TIMEOUT_S = 3.0
OBJECT_STORE_NBYTES = 80 * 1024 * 1024
"""Ray's least. Nothing of a request goes through it."""
MAX_TEMP_PATH = 30
"""Ray's socket paths below its folder take about 75 of the 107 characters that Unix allows."""


@dataclass(frozen=True, slots=True)
class RaySession:
    """What the deployment must know of the cluster it is on."""

    private: bool
    address: str
    """By which another process joins it."""
    driver_host: str
    """This machine's address inside the cluster."""
    num_gpus: float
    temp_folder: Path | None
    """Removed with a private session; None in a joined cluster."""
    on_new_process: Callable[[], None]
    """To be called when an actor has a new process."""


@contextmanager
def ray_session(config: DeployConfig) -> Generator[RaySession]:
    """Connect this process to Ray for the time of the ``with`` block.

    Call from the main thread: Ray's processes die with the thread that started them. Leaving the
    block ends a private session and all its processes, or only disconnects from a joined one.

    Args:
        config: Tells whether to join a cluster, see ``cluster_address``.

    Raises:
        ConfigError: the named cluster cannot be joined, or Ray does not start.
    """
    if address := cluster_address(config):
        with _joined(address, upload_code=config.upload_code) as session:
            yield session
    else:
        with _private() as session:
            yield session


@contextmanager
def _joined(address: str, *, upload_code: bool) -> Generator[RaySession]:
    inside_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    packages = [str(PROJECT_ROOT / package) for package in PACKAGES]
    runtime_env = None if inside_job or not upload_code else {"py_modules": packages}
    setting = "deploy.ray_address or RAY_ADDRESS"
    with joined(address, setting, runtime_env=runtime_env, log_to_driver=True):
        logging.getLogger("ray").setLevel(logging.WARNING)
        yield RaySession(
            private=False,
            address=address,
            driver_host=ray.util.get_node_ip_address(),
            num_gpus=ray.cluster_resources().get("GPU", 0.0),
            temp_folder=None,
            on_new_process=lambda: None,  # Ray's own processes end them there
        )


@contextmanager
def _private() -> Generator[RaySession]:
    folder = _short_temp_folder()
    reaper = Reaper(folder)
    before = set(psutil.Process().children())
    roots: set[psutil.Process] = set()
    try:
        try:
            _start_ray(folder)
        finally:
            roots |= set(psutil.Process().children()) - before
        reaper.tell(with_descendants(roots))
        yield RaySession(
            private=True,
            address=ray.get_runtime_context().gcs_address,
            driver_host=LOOPBACK,
            num_gpus=ray.cluster_resources().get("GPU", 0.0),
            temp_folder=folder,
            on_new_process=lambda: reaper.tell(with_descendants(roots)),
        )
    finally:
        # Listed first: what survives its parent is no descendant of ours afterwards.
        processes = with_descendants(roots)
        has_ended = False
        try:
            has_ended = run_bounded(ray.shutdown, timeout_s=SHUTDOWN_TIMEOUT_S)
        finally:
            end_processes(processes)
            shutil.rmtree(folder, ignore_errors=True)
            if has_ended:
                reaper.close()
            # Else the call that was left behind may still write there: the reaper, which outlives
            # this process, removes the folder after it.


def _start_ray(folder: Path) -> None:
    try:
        ray.init(
            address="local",
            num_cpus=0,  # nobody counts them: the deployment may be scaled
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_NBYTES,
            log_to_driver=True,
            logging_level=logging.WARNING,
            _temp_dir=str(folder),
            _node_ip_address=LOOPBACK,
        )
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"Ray does not start on this machine: {on_one_line(error)}") from error


def _short_temp_folder() -> Path:
    base = tempfile.gettempdir()
    return Path(
        tempfile.mkdtemp(prefix="sluice-", dir=base if len(base) <= MAX_TEMP_PATH else "/tmp")  # noqa: S108
    )
