"""A real Ray cluster of several nodes on this machine, each on a loopback address of its own.

So every node has its own ports and its own ``node:ADDRESS`` resource, as on machines of their own,
and workers on different ones talk by different addresses.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from deploy.cluster.processes import kill_processes, with_descendants
from tests.free_ports import free_port

ROOT = Path(__file__).parents[2]
LOOPBACK = "127.0.0.1"
HEAD = "127.0.0.2"
OURS = ("ray::ServiceActor", "ray::Controller", "ray::Sentinel")
"""What Ray calls the processes of a deployment."""
TIMEOUT_S = 90.0
COMMAND_TIMEOUT_S = 240.0
"""For one that starts a whole deployment, on a machine with other loads."""
MAX_LISTED = 1000
"""Of nodes or actors, the dead ones included; Ray by itself shows 100 of them."""
NUM_TRIES = 3
"""To start a node: the control service gives one up that is slow to answer at first."""
FAST_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}
"""A node that was killed refuses each check at once; one that is slow has a minute."""


def wait_until(holds: Callable[[], object], what: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """Return when ``holds``; fail after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"after {timeout_s:.0f} s, not yet: {what}"
        time.sleep(0.2)


class RayCluster:
    """Use as ``with RayCluster.open() as cluster``; nothing of it survives the block."""

    def __init__(self, folder: Path, *, head: str = HEAD, dashboard_host: str = LOOPBACK) -> None:
        self._folder = folder
        self._head = head
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._port = self.free_port(head)
        self.dashboard = f"http://{dashboard_host}:{self.free_port(dashboard_host)}"
        self.environment = {
            **_without_ray(os.environ),
            **FAST_HEALTH_CHECKS,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    @classmethod
    @contextmanager
    def open(cls, cpus: Mapping[str, int]) -> Iterator["RayCluster"]:
        """Start a head without CPUs, and at each address of ``cpus`` a node that has so many."""
        # Ray's socket paths below it must be short.
        with tempfile.TemporaryDirectory(
            prefix="slc-", dir="/tmp", ignore_cleanup_errors=True
        ) as folder:
            cluster = cls(Path(folder))
            try:
                cluster._start_head()
                for address, number in cpus.items():
                    cluster.add(address, number)
                yield cluster
            finally:
                for address in list(cluster._nodes):
                    cluster.lose(address)

    @property
    def address(self) -> str:
        """By which drivers and nodes join."""
        return f"{self._head}:{self._port}"

    def free_port(self, address: str) -> int:
        """Return a port that nothing at ``address`` listens on."""
        return free_port(address)

    def inside(self, _address: str) -> tuple[str, ...]:
        """Return what is written before a command so that it runs on the machine of an address."""
        return ()

    def _start_head(self, num_cpus: int = 0, **resources: float) -> None:
        host, port = self.dashboard.removeprefix("http://").split(":")
        self._start(
            self._head,
            *("--head", f"--port={self._port}", f"--temp-dir={self._folder / 'r'}"),
            *(f"--dashboard-host={host}", f"--dashboard-port={port}"),
            f"--ray-client-server-port={self.free_port(self._head)}",
            *_room(num_cpus, resources),
        )
        if not self._has_joined(self._head):
            raise AssertionError(f"the head ends: {self._log(self._head)}")

    def add(self, address: str, num_cpus: int, **resources: float) -> None:
        """Start a node. Returns when it has joined: two that start at once wait for each other."""
        for _ in range(NUM_TRIES):
            self._start(address, f"--address={self.address}", *_room(num_cpus, resources))
            if self._has_joined(address):
                return
        raise AssertionError(f"node {address} ends: {self._log(address)}")

    def _has_joined(self, address: str) -> bool:
        """Wait for a node that was started; return False if it ends."""
        try:
            wait_until(
                lambda: self._is_alive(address) or self._has_ended(address), f"node {address} alive"
            )
        except AssertionError as error:
            known = self._answer("nodes")
            raise AssertionError(f"{error}; {known}; {self._log(address)}") from None
        return not self._has_ended(address)

    def _log(self, address: str) -> str:
        return (self._folder / f"{address}.log").read_text()

    def _start(self, address: str, *arguments: str) -> None:
        agent_port = self.free_port(LOOPBACK)
        with (self._folder / f"{address}.log").open("w") as log:
            self._nodes[address] = subprocess.Popen(
                [
                    *self.inside(address),
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                    *(f"--node-ip-address={address}", "--object-store-memory=80000000"),
                    *(f"--dashboard-agent-listen-port={agent_port}", *arguments),
                ],
                env=self.environment,
                stdout=log,
                stderr=log,
                cwd="/",
            )

    def processes_on(self, address: str) -> list[psutil.Process]:
        """Return all processes of one node; none after its raylet was killed."""
        node = self._nodes[address]
        return [] if node.poll() is not None else with_descendants([psutil.Process(node.pid)])

    def ours(self) -> dict[psutil.Process, str]:
        """Return the processes of deployments on all nodes, with Ray's names of them."""
        found: dict[psutil.Process, str] = {}
        for address in self._nodes:
            for process in self.processes_on(address):
                with suppress(psutil.NoSuchProcess, IndexError):
                    title = process.cmdline()[0]
                    if title.startswith(OURS) or "serve" in process.cmdline():
                        found[process] = title
        return found

    def lose(self, address: str) -> None:
        """End a node as a power cut does."""
        node = self._nodes.pop(address)
        if node.poll() is None:
            kill_processes(with_descendants([psutil.Process(node.pid)]))
        node.wait()

    def kill_raylet(self, address: str) -> None:
        """Kill the one process by which Ray runs a node; what it runs there is to end with it."""
        (raylet,) = (p for p in self.processes_on(address) if name_of(p) == "raylet")
        kill_processes([raylet])

    def num_nodes(self) -> int:
        """Return how many are alive."""
        nodes = self._list("nodes")
        return sum(node["state"] == "ALIVE" for node in nodes)

    def _has_ended(self, address: str) -> bool:
        return self._nodes[address].poll() is not None

    def _is_alive(self, address: str) -> bool:
        nodes = self._answer("nodes") or []
        return any(node["node_ip"] == address and node["state"] == "ALIVE" for node in nodes)

    def living_actors(self) -> list[str]:
        """Return the classes of all actors of deployments that are not dead."""
        return [
            actor["class_name"]
            for actor in self._list("actors")
            if actor["state"] != "DEAD" and f"ray::{actor['class_name']}" in OURS
        ]

    def placement_groups(self) -> list[str]:
        """Return the ids of all that are there."""
        groups = self._list("placement_groups")
        return [group["placement_group_id"] for group in groups if group["state"] != "REMOVED"]

    def _list(self, kind: str) -> list[dict[str, Any]]:
        """Return what the head knows; a head that does not answer just now is asked again."""
        found: list[list[dict[str, Any]] | None] = []

        def has_answered() -> bool:
            found.append(self._answer(kind))
            return found[-1] is not None

        wait_until(has_answered, f"the head tells its {kind}")
        return found[-1] or []

    def _answer(self, kind: str) -> list[dict[str, Any]] | None:
        import httpx  # noqa: PLC0415 - of the tests alone

        try:
            url = f"{self.dashboard}/api/v0/{kind}?limit={MAX_LISTED}"
            answer = httpx.get(url, timeout=20).json()
        except (httpx.HTTPError, ValueError):
            return None
        return answer["data"]["result"]["result"] if answer["result"] else None

    def run(self, *arguments: str, cwd: Path = ROOT) -> str:
        """Return what a command beside the cluster prints; fail if it fails."""
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        said = f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, said
        return done.stdout

    def submit(self, name: str, *entrypoint: str) -> None:
        """Run ``ray job submit --working-dir . -- ENTRYPOINT`` in the project's folder."""
        options = ("--no-wait", f"--submission-id={name}", "--working-dir", ".")
        self._job("submit", *options, "--", *entrypoint)

    def stop(self, name: str) -> None:
        """Run ``ray job stop``, which waits until the job has ended."""
        self._job("stop", name)

    def job_logs(self, name: str) -> str:
        """Return what the job's driver has printed so far."""
        return self._job("logs", name)

    def _job(self, command: str, *arguments: str) -> str:
        at = f"--address={self.dashboard}"
        return self.run("ray.scripts.scripts", "job", command, at, *arguments)

    def uploads(self) -> list[int]:
        """Return the sizes of the working folders that jobs have brought."""
        return [
            sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            for folder in self._folder.glob("r/session_2*/runtime_resources/working_dir_files/*")
            if folder.is_dir()
        ]


def _without_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what is said to others than Ray.

    A session of its own, as an earlier test may have begun in this process, is told that no second
    node can join: by ``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0``.
    """
    return {name: value for name, value in environment.items() if not name.startswith("RAY_")}


def _room(num_cpus: int, resources: Mapping[str, float]) -> tuple[str, str]:
    return f"--num-cpus={num_cpus}", f"--resources={json.dumps(resources)}"


def name_of(process: psutil.Process) -> str | None:
    """Return the name of a process that may have ended; None: it has."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return None


def kill(process: psutil.Process) -> None:
    """SIGKILL."""
    os.kill(process.pid, signal.SIGKILL)


def said_on_a_cluster(program: str, *, timeout_s: float) -> dict[str, Any]:
    """Return the JSON of the last line that ``program`` prints, run beside a cluster of its own.

    Its first argument is the cluster's address.
    """
    with RayCluster.open({}) as cluster:
        done = subprocess.run(
            [sys.executable, "-c", program, cluster.address],
            env=cluster.environment | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd="/",
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
