"""A real Ray cluster whose nodes are hosts: each in a network namespace, with a cable to the other.

A host has its own addresses, ports and loopback, and a Ray folder of its own. What hosts of one
machine share all the same is memory, files and process ids: so Ray's sockets lie where the other
host does not look for them, and UCX is told to use the cable.

What Ray 2.60 does with addresses, seen with ``ss``: raylets, the head's control service and agents
listen on all addresses of their host; the dashboard and what makes environments, on the one that
``--node-ip-address`` or ``--dashboard-host`` gives; everybody finds the others by that address. On
the loopback are doors for the host's own processes only, so the cable alone joins two hosts.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from deploy.cluster.processes import kill_processes
from tests.chaos.network import Network, over_tcp
from tests.deploy.ray_cluster import LOOPBACK, RayCluster, wait_until
from tests.free_ports import free_port

CPUS_OF_A_HOST = 4
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
}
"""Ray misses a host that is cut off after 20 s, and not one that is for half of it."""


class RayHosts(RayCluster):
    """Use as ``with RayHosts.of("first", "second") as hosts``: a head and further nodes, by name.

    Each offers one of a resource of its name. Nothing of them survives the block.
    """

    def __init__(self, folder: Path, network: Network, head: str) -> None:
        self.network = network
        self._namespaces = {place.host: str(place.namespace) for place in network.places.values()}
        host = network.places[head].host
        super().__init__(folder, head=host, dashboard_host=host)
        self.environment |= {**HEALTH_CHECKS, **over_tcp()}

    @classmethod
    @contextmanager
    def of(cls, head: str, *others: str) -> Iterator["RayHosts"]:
        """Start Ray on all of them."""
        with (
            Network.open([head, *others]) as network,
            tempfile.TemporaryDirectory(
                prefix="slh-", dir="/tmp", ignore_cleanup_errors=True
            ) as folder,
        ):
            hosts = cls(Path(folder), network, head)
            try:
                hosts._start_head(CPUS_OF_A_HOST, **{head: 1.0})
                for name in others:
                    hosts.start(name)
                yield hosts
            finally:
                for address in list(hosts._nodes):
                    hosts.lose(address)
                with suppress(AssertionError):
                    wait_until(lambda: not hosts._left(), "all processes have ended")
                left = hosts._left()
                kill_processes(left)
            assert left == [], "processes that outlive Ray"

    def _left(self) -> list[psutil.Process]:
        """Return what runs on a host, or is about to end there."""
        left: list[psutil.Process] = []
        for name in self.network.places:
            for pid in self.network.processes_of(name):
                with suppress(psutil.NoSuchProcess):
                    left.append(psutil.Process(pid))
        return left

    def start(self, name: str) -> None:
        """Start Ray on a host that is no head."""
        self.add(self.host(name), CPUS_OF_A_HOST, **{name: 1.0})

    def host(self, name: str) -> str:
        """Return an address."""
        return self.network.places[name].host

    def actors_on(self, name: str) -> dict[str, int]:
        """Return the process ids of the actors that live on a host, by name."""
        address = self.host(name)
        nodes = [node["node_id"] for node in self._list("nodes") if node["node_ip"] == address]
        return {
            actor["name"]: int(actor["pid"])
            for actor in self._list("actors")
            if actor["state"] == "ALIVE" and actor["node_id"] in nodes and actor["name"]
        }

    def free_port(self, _address: str) -> int:
        """Return a port that is free here, and so on a host, where hardly any is taken."""
        return free_port(LOOPBACK)

    def inside(self, address: str) -> tuple[str, ...]:
        """Return what enters the namespace of a host."""
        return ("ip", "netns", "exec", self._namespaces[address])

    def _start(self, address: str, *arguments: str) -> None:
        folder = () if "--head" in arguments else (f"--temp-dir={self._folder / 'o'}",)
        super()._start(address, *arguments, *folder)
