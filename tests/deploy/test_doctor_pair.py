"""Two machines are tried out as a pair before a deployment trusts the way between them.

The failures guarded against: two machines that each pass the doctor while a firewall, a missing
route or another device keeps UCX from crossing; and KV that goes over TCP between two machines of
an RDMA cluster, which no look at either of them shows.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.parser import run
from deploy.doctor.machine import RdmaPort
from deploy.doctor.pair import Address, check_pair, finding_of_pair
from deploy.doctor.peer import Seen
from tests.chaos.network import Network, over_tcp, why_not
from tests.free_ports import free_port, refused_port

ROOT = Path(__file__).parents[2]
PORT = RdmaPort("mlx5_0/1", "4: ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)")
TCP = Seen(transport="ucx", path_kind="tcp", path="tcp/eth0 by message", gb_per_s=1.52)


def test_a_pair_that_crosses_by_rdma_is_well() -> None:
    seen = Seen(transport="ucx", path_kind="rdma", path="rc_mlx5/mlx5_0:1", gb_per_s=41.0)
    finding = finding_of_pair("reads from b", seen, [PORT])
    assert finding.level == "ok"
    assert finding.text == "rdma (rc_mlx5/mlx5_0:1), 41 GB/s for 64 MB"


def test_a_pair_that_falls_back_to_tcp_is_told_where_to_look() -> None:
    finding = finding_of_pair("reads from b", TCP, [PORT])
    assert finding.level == "warn"
    assert finding.fix is not None
    assert "mlx5_0/1 has a link here" in finding.fix


def test_reading_from_oneself_is_no_test_of_a_pair() -> None:
    seen = Seen(transport="ucx", path_kind="shared_memory", path="cma/memory", gb_per_s=6.0)
    finding = finding_of_pair("reads from b", seen, [])
    assert finding.level == "warn"
    assert finding.fix is not None
    assert "on another one" in finding.fix


def test_a_read_that_fails_is_told_from_a_doctor_that_is_not_there() -> None:
    failed = finding_of_pair("reads from b", Seen(error="a read is not over after 20 s"), [])
    assert failed.level == "fail"
    assert failed.fix is not None
    assert "the two reach each other, but UCX does not" in failed.fix

    with refused_port() as port:
        absent = check_pair("auto", Address("127.0.0.1", port), [])
    assert absent.level == "fail"
    assert absent.text == f"127.0.0.1:{port}: Connection refused"
    assert absent.fix is not None
    assert absent.fix.startswith("run sluice doctor --listen there")


@pytest.mark.parametrize("text", ["here", ":7000", "a:", "a:0", "a:65536", "a:x"])
def test_what_is_no_address_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["doctor", "--peer", text])
    said = f"argument --peer: {text!r} is not HOST:PORT, with a port from 1 to 65535"
    assert said in capsys.readouterr().err


def test_addresses_are_read_as_they_are_written() -> None:
    for text in ("10.0.0.1:7000", "node-a:7000", "[fd00::1]:7000"):
        assert str(Address.parse(text)) == text


@contextmanager
def listening(network: Network, name: str, port: int) -> Generator[str]:
    """Run the doctor that listens on a host, and see that Ctrl-C ends it well."""
    address = f"{network.places[name].host}:{port}"
    process = subprocess.Popen(
        command(network, name, "--listen", address),
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        assert process.stderr.readline() == (
            f"on the other machine: sluice doctor --peer {address}\n"
        )
        yield address
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.wait()


def command(network: Network, name: str, *arguments: str) -> list[str]:
    enter = ("ip", "netns", "exec", str(network.places[name].namespace))
    return [*enter, sys.executable, "-m", "deploy.main", "doctor", *arguments]


def environment() -> Mapping[str, str]:
    return os.environ | over_tcp()


def ask(network: Network, name: str, address: str) -> tuple[int, dict[str, Any]]:
    """Return exit code and finding about the pair."""
    done = subprocess.run(
        command(network, name, "--json", "--peer", address),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    findings = json.loads(done.stdout)["findings"]
    (finding,) = [f for f in findings if f["name"].startswith("reads from")]
    return done.returncode, finding


@pytest.mark.slow
@pytest.mark.ucx
def test_bytes_cross_the_cable_between_two_hosts_and_a_firewall_is_found() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(f"no network namespaces with shaped links: {reason}")
    with Network.open(["a", "b"]) as network:
        port = free_port()
        with listening(network, "a", port) as address:
            before = network.nbytes_to("b")
            code, finding = ask(network, "b", address)
            assert code == 0
            assert finding["level"] == "warn"
            assert finding["text"].startswith("tcp (tcp/eth0")
            assert network.nbytes_to("b") - before > 64 * 2**20

            network.hold("b", "a", port=port)
            code, finding = ask(network, "b", address)
            assert code == 1
            assert finding["level"] == "fail"
            assert finding["text"] == f"{address}: timed out"
