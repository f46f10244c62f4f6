"""Ports that are settled before the services that listen on them run.

The failure guarded against: a start that fails now and then, since something else was given the
port that had been found free for the router.
"""

import errno
import socket
from contextlib import closing

import pytest

from core.errors import ConfigError
from deploy.cluster.ports import claim_port, held
from tests.free_ports import free_port

HOST = "127.0.0.1"


@pytest.fixture
def port() -> int:
    return free_port(HOST)


def test_a_held_port_is_given_to_nobody_else(port: int) -> None:
    with held(HOST, port), socket.socket() as stranger:
        with pytest.raises(OSError, match=r".") as refusal:
            stranger.bind((HOST, port))
        assert refusal.value.errno == errno.EADDRINUSE
    with socket.socket() as stranger:
        stranger.bind((HOST, port))


def test_a_port_that_cannot_be_had_is_told_with_its_field_and_what_to_give(port: int) -> None:
    with socket.create_server((HOST, port)):
        taken = rf"^router\.x: cannot listen on {HOST}:{port} .*stop what .*give another router\.x$"
        with pytest.raises(ConfigError, match=taken):
            claim_port(HOST, port, field="router.x")
    for elsewhere in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ConfigError, match=r"give an address of this machine in router\.host$"):
            claim_port(elsewhere, port, field="router.x")


def test_our_service_listens_on_it_all_the_same_and_again_after_a_restart(port: int) -> None:
    with held(HOST, port):
        for _ in range(2):
            with (
                closing(socket.create_server((HOST, port))) as service,
                socket.create_connection((HOST, port)) as client,
            ):
                service.accept()[0].close()
                assert client.recv(1) == b""
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((HOST, port))
