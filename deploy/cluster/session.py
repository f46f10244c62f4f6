"""A Ray cluster for one deployment: a private one on this machine, or one that runs already.

A private session leaves nothing behind. Its processes die with this one (Ray starts them with a
parent-death signal, and each actor sets its own), and its folder is removed by us. If we are
killed, a reaper that outlives us does both.
"""

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
Guard = Callable[[], AbstractContextManager[None]]
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
def ray_session(config: DeployConfig, starting: Guard = nullcontext) -> Generator[RaySession]:
    """Connect this process to Ray for the time of the ``with`` block.

    Leaving the block ends a private session and all its processes, or only disconnects from a
    joined one. When it begins, Ray has put a handler of its own before that of SIGTERM.

    Args:
        config: Tells whether to join a cluster, see ``cluster_address``.
        starting: Makes a ``with`` block around the start of Ray, or the joining, during which the
            calling thread only waits. It may end this process; Ray is in no state to go on from.

    Raises:
        ConfigError: the named cluster cannot be joined, or Ray does not start.
    """
    if address := cluster_address(config):
        with _joined(address, starting, upload_code=config.upload_code) as session:
            yield session
    else:
        with _private(starting) as session:
            yield session


@contextmanager
def _joined(address: str, starting: Guard, *, upload_code: bool) -> Generator[RaySession]:
    inside_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    packages = [str(PROJECT_ROOT / package) for package in PACKAGES]
    runtime_env = None if inside_job or not upload_code else {"py_modules": packages}
    setting = "deploy.ray_address or RAY_ADDRESS"
    cluster = joined(address, setting, runtime_env=runtime_env, log_to_driver=True)
    with ExitStack() as stack:
        with starting():
            stack.enter_context(cluster)
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
def _private(starting: Guard) -> Generator[RaySession]:
    folder = _short_temp_folder()
    reaper = Reaper(folder)
    before = set(psutil.Process().children())
    roots: set[psutil.Process] = set()
    is_over = threading.Event()
    try:
        try:
            with starting():
                _call_and_stay(lambda: _start_ray(folder), is_over)
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
            is_over.set()
            shutil.rmtree(folder, ignore_errors=True)
            if has_ended:
                reaper.close()
            # Else the call that was left behind may still write there: the reaper, which outlives
            # this process, removes the folder after it.


def _call_and_stay(start: Callable[[], None], is_over: threading.Event) -> None:
    """Call ``start`` in a thread that stays until ``is_over``, and raise what it raises.

    Ray's processes die with the thread that started them. In the main one Ray would take SIGTERM,
    and keep signals waiting for the seconds that it needs.
    """
    started: Future[None] = Future()

    def run() -> None:
        try:
            start()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            started.set_exception(error)
        else:
            started.set_result(None)
            is_over.wait()

    threading.Thread(target=run, name="ray", daemon=True).start()
    started.result()


def _start_ray(folder: Path) -> None:
    try:
        ray.init(
            address="local",
            num_cpus=0,  # nobody counts them: the deployment may be scaled
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_NBYTES,
            log_to_driver=True,
            logging_level=logging.ERROR,  # one of its warnings: that it takes no signal
            _temp_dir=str(folder),
            _node_ip_address=LOOPBACK,
        )
        logging.getLogger("ray").setLevel(logging.WARNING)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"Ray does not start on this machine: {on_one_line(error)}") from error


def _short_temp_folder() -> Path:
    base = tempfile.gettempdir()
    return Path(
        tempfile.mkdtemp(prefix="sluice-", dir=base if len(base) <= MAX_TEMP_PATH else "/tmp")  # noqa: S108
    )
