"""A command that asks a cluster which is gone ends in seconds, with one line.

The failure guarded against: ``sluice scale`` and ``sluice down`` that stand for a quarter of an
hour and print Ray's own warnings, because a cluster ended uncleanly or a firewall swallows packets.
"""

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.cli import run
from deploy.cluster_reach import join_in_time, require_listener


@contextmanager
def listener() -> Generator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_an_address_where_nothing_listens_is_not_joined() -> None:
    with listener() as address:
        pass
    joined = threading.Event()
    with pytest.raises(ConnectionError, match="nothing answers there"):
        join_in_time(joined.set, address)
    assert not joined.is_set()


def test_a_cluster_that_takes_the_connection_and_never_answers_is_given_up() -> None:
    release = threading.Event()
    with listener() as address, pytest.raises(ConnectionError, match=r"within 0\.05 s"):
        join_in_time(release.wait, address, timeout_s=0.05)
    release.set()


def test_what_joining_raises_is_raised() -> None:
    def refuse() -> None:
        raise RuntimeError("version 2 of Ray, not 3")

    with listener() as address, pytest.raises(RuntimeError, match="version 2"):
        join_in_time(refuse, address)


@pytest.mark.parametrize("address", ["auto", "local", "ray://head:10001", "head", "head:x"])
def test_what_is_no_host_and_port_is_left_to_ray(address: str) -> None:
    require_listener(address)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "no-such-host.invalid:6379"])
def test_an_address_that_cannot_be_is_a_connection_error(address: str) -> None:
    with pytest.raises(ConnectionError):
        require_listener(address)


def test_where_nobody_has_started_ray_no_strange_process_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    assert run(["scale", "decode=2"]) == 2
    assert "no Ray cluster was started here; give --name or --address" in capsys.readouterr().err
