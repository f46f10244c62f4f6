"""Two machines: one offers memory to read, the other reads it, as decode reads from prefill.

The listening side tells whoever connects how its source is reached, in one line of JSON; the bytes
then travel as UCX chooses. Nothing asks for a key, and nothing but the 64 MB that are made for this
can be read.
"""

import socket
from argparse import ArgumentTypeError
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import msgspec
from rich.console import Console

from core.errors import ConfigError, SluiceError
from core.messages import PoolEndpoint
from deploy.doctor.findings import Finding
from deploy.doctor.machine import RdmaPort
from deploy.doctor.peer import Seen, Task
from deploy.doctor.trial import NBYTES, offering, read_from

CONNECT_TIMEOUT_S: Final = 5.0
MAX_LINE_NBYTES: Final = 2**21
_FIX_SILENT: Final = (
    "run sluice doctor --listen there, with an address of that machine, and let a firewall between "
    "the two pass the port"
)
_FIX_UNREAD: Final = (
    "the two reach each other, but UCX does not: it listens on TCP ports of its own choice, on the "
    "devices that UCX_NET_DEVICES allows there; let a firewall pass them, and compare the devices "
    "that both doctors found"
)


class Offer(msgspec.Struct, frozen=True):
    """What the listening side says."""

    endpoint: PoolEndpoint
    nbytes: int


class Address(msgspec.Struct, frozen=True):
    """Where one listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Return the address that HOST:PORT means.

        Raises:
            ArgumentTypeError: it means none.
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            message = f"{text!r} is not HOST:PORT, with a port from 1 to 65535"
            raise ArgumentTypeError(message)
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def run_listen(transport: str, address: Address) -> int:
    """Offer memory at ``address`` until Ctrl-C, and return 0.

    Raises:
        ConfigError: nothing can listen there.
        SluiceError: the transport does not open here.
    """
    console = Console(stderr=True)
    with (
        _listening(address) as server,
        offering(Task(transport, NBYTES, {})) as offered,
    ):
        if isinstance(offered, Seen):
            raise SluiceError(f"{offered.error}; sluice doctor says more")
        line = msgspec.json.encode(Offer(offered, NBYTES)) + b"\n"
        console.print(f"on the other machine: sluice doctor --peer {address}", highlight=False)
        console.print("Ctrl-C stops")
        try:
            while True:
                connection, (host, *_) = server.accept()
                with connection:
                    connection.settimeout(CONNECT_TIMEOUT_S)
                    connection.sendall(line)
                console.print(f"{host} asks to read", highlight=False)
        except KeyboardInterrupt:
            return 0


@contextmanager
def _listening(address: Address) -> Generator[socket.socket]:
    try:
        server = socket.create_server(
            (address.host, address.port),
            family=socket.AF_INET6 if ":" in address.host else socket.AF_INET,
        )
    except OSError as error:
        raise ConfigError(
            f"--listen {address}: {error.strerror or error}; give an address of this machine and a "
            "free port"
        ) from error
    with server:
        yield server


def check_pair(transport: str, address: Address, ports: list[RdmaPort]) -> Finding:
    """Read from the machine that listens at ``address``, and return how that went.

    Args:
        transport: As asked for.
        address: Of ``sluice doctor --listen``.
        ports: Of RDMA, that this process may use.
    """
    name = f"reads from {address.host}"
    try:
        offer = _offer_of(address)
    except OSError as error:
        return Finding(name, "fail", f"{address}: {error.strerror or error}", _FIX_SILENT)
    except msgspec.DecodeError:
        return Finding(name, "fail", f"{address}: what listens there is no doctor", _FIX_SILENT)
    return finding_of_pair(
        name, read_from(offer.endpoint, Task(transport, offer.nbytes, {})), ports
    )


def _offer_of(address: Address) -> Offer:
    with socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S) as connection:
        connection.settimeout(CONNECT_TIMEOUT_S)
        with connection.makefile("rb") as stream:
            return msgspec.json.decode(stream.readline(MAX_LINE_NBYTES), type=Offer)


def finding_of_pair(name: str, seen: Seen, ports: list[RdmaPort]) -> Finding:
    """Return what a read between the machines has shown. Pure."""
    if seen.error is not None:
        return Finding(name, "fail", seen.error, _FIX_UNREAD)
    rate = f"{seen.gb_per_s:.2g} GB/s for 64 MB"
    if seen.path_kind == "unknown":
        return Finding(name, "ok", f"{rate}; {seen.transport} does not tell by which path")
    text = f"{seen.path_kind.replace('_', ' ')} ({seen.path}), {rate}"
    if seen.path_kind == "rdma":
        return Finding(name, "ok", text)
    if seen.path_kind in {"shared_memory", "cuda_ipc"}:
        fix = "that is this machine: run this on another one"
        return Finding(name, "warn", text, fix)
    if ports:
        fix = (
            f"{ports[0].name} has a link here: see sluice doctor on the other machine, and whether "
            "the two are in one RDMA network"
        )
    else:
        fix = "RDMA devices on both machines, or compare the rate with that of the link"
    return Finding(name, "warn", text, fix)
