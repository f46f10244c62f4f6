"""A command that asks a cluster which is gone ends in seconds, with one line.

The failure guarded against: ``sluice serve``, ``scale`` and ``down`` that stand for a quarter of an
hour and print Ray's own warnings, because a cluster ended uncleanly or a firewall swallows packets.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.config import DeployConfig
from core.errors import ConfigError
from deploy.cli.parser import run
from deploy.cluster.environment import cluster_address
from deploy.cluster.reach import joined, require_listener
from deploy.run_file import RunningSession, announced
from tests.free_ports import refused_port

ROOT = Path(__file__).parents[2]
HANGS_AFTER_S = 60.0


@contextmanager
def listener() -> Generator[str]:
    """Take connections on every interface: Ray asks this host's address in place of loopback."""
    with socket.create_server(("", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def joins(arguments: list[str], *, bound_s: float) -> subprocess.CompletedProcess[str]:
    """Run ``sluice`` in a process of its own: a join that is given up goes on in it."""
    bounded = (
        "import sys; from deploy.cli import parser; from deploy.cluster import reach; "
        f"reach.JOIN_TIMEOUT_S = {bound_s}"
    )
    return subprocess.run(
        [sys.executable, "-c", f"{bounded}; sys.exit(parser.run(sys.argv[1:]))", *arguments],
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER_S,
        check=False,
    )


COMMANDS = [
    pytest.param(["serve", "--set", "deploy.ray_address={}"], "deploy.ray_address", id="serve"),
    pytest.param(["down", "--address={}"], "--address", id="down"),
]


@pytest.mark.parametrize(("arguments", "setting"), COMMANDS)
def test_a_cluster_that_takes_the_connection_and_never_answers_is_given_up(
    arguments: list[str], setting: str
) -> None:
    with listener() as address:
        result = joins([each.format(address) for each in arguments], bound_s=0.2)
    assert result.returncode == 2
    reason = "it did not answer within 0.2 s"
    message = (
        f"no Ray cluster can be joined at {address} ({reason}); check {setting} or RAY_ADDRESS"
    )
    assert result.stderr.splitlines()[-1] == f"sluice: error: {message}"
    assert "SIGTERM" not in result.stderr


def test_an_address_where_nothing_listens_is_not_joined() -> None:
    with (
        refused_port() as port,
        pytest.raises(ConfigError, match="nothing answers there"),
        joined(f"127.0.0.1:{port}", "--address"),
    ):
        pass


def test_what_ray_refuses_is_one_error() -> None:
    with (
        listener() as address,
        pytest.raises(ConfigError, match=r"\(Unknown keyword .*\); check --address"),
        joined(address, "--address", no_such_argument=1),
    ):
        pass


@pytest.mark.parametrize("word", ["", "local"])
def test_ray_s_word_for_a_cluster_of_its_own_names_none(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", word)
    assert cluster_address(DeployConfig()) is None
    assert cluster_address(DeployConfig(ray_address="local")) is None


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
    said = capsys.readouterr().err
    assert "no deployment called 'sluice' of this user runs on this machine, and " in said
    looked_at = tmp_path / "ray" / "ray_current_cluster"
    assert f"{looked_at}, where ray start leaves the address of a cluster, has none; " in said
    assert "give --name or --address" in said


def test_who_asks_for_a_deployment_that_is_not_there_is_told_of_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    session = RunningSession(address="127.0.0.1:1", token="", pid=os.getpid())
    with announced("user7", session), announced("b", session):
        assert run(["down", "--name", "a"]) == 2
    said = capsys.readouterr().err
    assert "no deployment called 'a' of this user runs on this machine (running here: b, us" in said
