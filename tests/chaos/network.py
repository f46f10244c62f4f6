"""A network of its own for a deployment: a namespace and a cable for each process, and one switch.

Made of ``ip``, ``bridge`` and ``tc``; a cable that is cut drops what is sent, without a word to
either end, as a dead switch does. Nothing is left when the block ends.
"""

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TOOLS = ("ip", "bridge", "tc")
FAST = "1gbit"
NEWNET = 0x40000000  # CLONE_NEWNET
_numbers = itertools.count()


@dataclass(frozen=True)
class Place:
    """Where a process of a deployment runs."""

    host: str
    namespace: str | None = None
    """None: that of the test."""


class Network:
    """Use as ``with Network.open(names)``. The test itself is at the switch, as ``gateway``."""

    def __init__(self, prefix: str, subnet: str) -> None:
        self._prefix = prefix
        self._bridge = f"{prefix}br"
        self._subnet = subnet
        self.gateway = Place(f"{subnet}.1")
        self.places: dict[str, Place] = {}
        self._held: dict[tuple[str, str], int] = {}
        """Number of the first of the filters that drop what one sends to a port of another."""

    @classmethod
    @contextmanager
    def open(cls, names: list[str], *, rate: str = FAST) -> Iterator["Network"]:
        """Connect ``names``; each sends ``rate`` at most to any other of them."""
        network = cls(f"sl{os.getpid():x}{next(_numbers)}", _free_subnet())
        try:
            network._make_switch()
            for name in names:
                network._connect(name)
            for name in names:
                network._shape(name, rate)
            yield network
        finally:
            network._remove()

    def cut(self, name: str) -> None:
        """Nothing goes to or from ``name`` any more."""
        _run("ip", "link", "set", self._cable(name), "nomaster")

    def heal(self, name: str) -> None:
        """Take ``cut`` back."""
        _run("ip", "link", "set", self._cable(name), "master", self._bridge)

    def part(self, *names: str) -> None:
        """Nothing goes between ``names`` any more; all others still reach each of them."""
        for name in names:
            _run("bridge", "link", "set", "dev", self._cable(name), "isolated", "on")

    def join(self, *names: str) -> None:
        """Take ``part`` back."""
        for name in names:
            _run("bridge", "link", "set", "dev", self._cable(name), "isolated", "off")

    def hold(self, sender: str, receiver: str, *, port: int, acks_pass: bool = False) -> None:
        """Drop what ``sender`` sends to ``port`` of ``receiver``, and nothing else.

        With ``acks_pass``, what says nothing but that the other's words have come is not dropped:
        without it, TCP soon sends no more of those.
        """
        preference = 2 * len(self._held) + 1
        self._held[sender, receiver] = preference
        match = f"match ip dst {self.places[receiver].host}/32 match ip dport {port} 0xffff"
        is_short = f"match u16 0 {'0xffc0' if acks_pass else '0xffff'} at 2"  # of less than 64 B
        for number, what, to in ((0, f"{is_short} {match}", "1:2"), (1, match, "1:3")):
            held = f"filter add parent 1: protocol ip prio {preference + number}"
            self._tc(sender, f"{held} u32 {what} flowid {to}")

    def release(self, sender: str, receiver: str) -> None:
        """Take ``hold`` back."""
        preference = self._held.pop((sender, receiver))
        for number in (preference, preference + 1):
            self._tc(sender, f"filter del parent 1: protocol ip prio {number}")

    def nbytes_to(self, name: str) -> int:
        """Return how much has gone to ``name`` over its cable."""
        counter = Path("/sys/class/net", self._cable(name), "statistics/tx_bytes")
        return int(counter.read_text())

    def processes_of(self, name: str) -> list[int]:
        """Return the ids of all processes that run there."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self._namespace(name)).split()]

    def _namespace(self, name: str) -> str:
        namespace = self.places[name].namespace
        assert namespace is not None, "all but the gateway have one"
        return namespace

    def _cable(self, name: str) -> str:
        return f"{self._prefix}v{list(self.places).index(name)}"

    def _make_switch(self) -> None:
        # Without an address of its own it takes the least of its cables', and another when that one
        # is cut: what the others send to the gateway then goes nowhere, for up to a minute.
        address = f"02:00:00:00:00:{int(self._subnet.rpartition('.')[2]):02x}"
        _run("ip", "link", "add", self._bridge, "address", address, "type", "bridge")
        _run("ip", "address", "add", f"{self.gateway.host}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")

    def _connect(self, name: str) -> None:
        number = len(self.places)
        namespace = f"{self._prefix}n{number}"
        self.places[name] = Place(f"{self._subnet}.{10 + number}", namespace)
        cable = self._cable(name)
        _run("ip", "netns", "add", namespace)
        peer = ("peer", "name", "eth0", "netns", namespace)
        _run("ip", "link", "add", cable, "type", "veth", *peer)
        inside = ("ip", "-n", namespace)
        _run(*inside, "address", "add", f"{self.places[name].host}/24", "dev", "eth0")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "set", "eth0", "up")
        _run("ip", "link", "set", cable, "master", self._bridge)
        _run("ip", "link", "set", cable, "up")

    def _shape(self, name: str, rate: str) -> None:
        """Class 1:1 takes what goes to the test, 1:2 what goes to the others, 1:3 is a hole."""
        self._tc(name, "qdisc add root handle 1: htb default 1 r2q 100")
        for number, of_class in ((1, FAST), (2, rate), (3, FAST)):
            self._tc(name, f"class add parent 1: classid 1:{number} htb rate {of_class}")
        self._tc(name, "qdisc add parent 1:3 handle 30: bfifo limit 1")
        for other, place in self.places.items():
            if other != name:
                match = f"match ip dst {place.host}/32"
                self._tc(name, f"filter add parent 1: protocol ip prio 99 u32 {match} flowid 1:2")

    def _tc(self, name: str, command: str) -> None:
        what, verb, *rest = command.split()
        inside = ("ip", "netns", "exec", self._namespace(name))
        _run(*inside, "tc", what, verb, "dev", "eth0", *rest)

    def _remove(self) -> None:
        for place in self.places.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", str(place.namespace))
        for name in self.places:
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "link", "delete", self._cable(name))
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("ip", "link", "delete", self._bridge)


def enter(namespace: str) -> None:
    """Move this thread, and all that it starts, into ``namespace``."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open("rb") as file:
        if libc.setns(file.fileno(), NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


@cache
def why_not() -> str | None:
    """Return why there can be no such network here; None: there can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not on this machine: {', '.join(missing)}"
    try:
        with Network.open(["a", "b"]) as network:
            network.part("a", "b")
            network.hold("a", "b", port=1)
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}`: {error.stderr.strip()}"
    return None


def over_tcp() -> Mapping[str, str]:
    """Return the environment in which UCX does not see that all namespaces share one memory."""
    return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}


def _free_subnet() -> str:
    """Return one that nobody has; where two look at once, each begins elsewhere."""
    taken = _run("ip", "-o", "-4", "address", "show")
    numbers = ((os.getpid() + n) % 256 for n in range(256))
    return next(s for n in numbers if f"{(s := f'10.213.{n}')}." not in taken)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
