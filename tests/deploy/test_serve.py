"""The real command, its real workers and the default model, from the first line to the last.

The failures guarded against: a worker that Ray does not bring back, a router that comes back at
another port, and a Ctrl-C that leaves something running.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.api_client import ApiClient, UnreachableError
from deploy.default_model import DEFAULT_MODEL_NAME
from deploy.model_source import cache_folder

ROOT = Path(__file__).parents[2]
STOP_TIMEOUT_S = 120.0
"""Generous: other work may share this machine."""
LONG_PROMPT = "The herons stand on the north rocks before the fog comes. " * 30

pytestmark = [
    pytest.mark.ray,
    pytest.mark.ucx,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (cache_folder() / "models" / DEFAULT_MODEL_NAME).is_dir(),
        reason="the default model is not in the cache; run: sluice fetch",
    ),
]


class Sluice:
    """``sluice serve`` as a child process."""

    def __init__(self, *arguments: str) -> None:
        self.temp = Path(tempfile.mkdtemp(prefix="slt-", dir="/tmp"))
        self.log = self.temp / "log"
        self.ray_temp = self.temp / "t"
        self.ray_temp.mkdir()
        with self.log.open("w") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "deploy.main", "serve", "--port", "0", *arguments],
                stderr=log,
                env=os.environ | {"TMPDIR": str(self.ray_temp)},
                cwd=ROOT,
                start_new_session=True,
            )
        self.seen: set[psutil.Process] = set()

    def client(self) -> ApiClient:
        """Wait until it serves."""
        url = self.wait_for_line("serving at ").split()[2].removesuffix("/v1")
        self.seen |= set(psutil.Process(self.child.pid).children(recursive=True))
        return ApiClient(url, timeout_s=120.0)

    def written(self) -> str:
        """Return the lines of the log that are whole: the last may still be written."""
        return self.log.read_bytes().rpartition(b"\n")[0].decode()

    def wait_for_line(self, start: str, *, count: int = 1) -> str:
        """Return the ``count``-th line of the log that holds ``start``; pytest bounds the wait."""
        while True:
            lines = [line for line in self.written().splitlines() if start in line]
            if len(lines) >= count:
                return lines[count - 1]
            try:
                code = self.child.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"exit code {code}:\n{self.log.read_text()}")

    def pid_of(self, service: str, *, life: int = 1) -> int:
        """Return the pid that Ray's log prefix gives a service."""
        prefixes: list[int] = []
        while len(prefixes) < life:
            line = self.wait_for_line(f"({service} pid=")
            text = self.written()
            found = [part.split(")")[0] for part in text.split(f"({service} pid=")[1:]]
            prefixes = list(dict.fromkeys(int(pid) for pid in found))
            assert line
        return prefixes[life - 1]

    def stop(self) -> None:
        """Press Ctrl-C, and check that all is gone."""
        self.seen |= set(psutil.Process(self.child.pid).children(recursive=True))
        self.child.send_signal(signal.SIGINT)
        assert self.child.wait(STOP_TIMEOUT_S) == 0
        _, alive = psutil.wait_procs(self.seen, timeout=STOP_TIMEOUT_S)
        assert alive == []
        assert list(self.ray_temp.iterdir()) == []

    def clean_up(self) -> None:
        """End what a failed test leaves."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            try:
                self.child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        shutil.rmtree(self.temp, ignore_errors=True)


@pytest.fixture
def sluice() -> Iterator[Sluice]:
    """Serve the default model from one prefill and one decode worker."""
    running = Sluice()
    yield running
    running.clean_up()


def complete(client: ApiClient, prompt: str) -> tuple[str, dict[str, Any]]:
    """Return the text and the statistics of one greedy completion."""
    body = {
        "model": DEFAULT_MODEL_NAME,
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
    }
    text, stats = "", {}
    for chunk in client.stream("/v1/completions", body):
        text += "".join(choice["text"] for choice in chunk["choices"])
        stats = chunk.get("sluice") or stats
    return text, stats


def test_workers_and_router_that_are_killed_come_back_and_ctrl_c_leaves_nothing(
    sluice: Sluice,
) -> None:
    # Given a running deployment that disaggregates long prompts
    client = sluice.client()
    assert {worker.worker_id for worker in client.workers()} == {"prefill-0", "decode-0"}
    text, stats = complete(client, LONG_PROMPT)
    assert stats["path"] == "disaggregated"
    assert stats["transport"] in {"ucx", "nixl", "ucxx"}  # the best that loads here

    # When the prefill worker is killed, then its death is told, and a long prompt is answered
    # the same, whoever prefills it
    os.kill(sluice.pid_of("prefill-0"), signal.SIGKILL)
    sluice.wait_for_line("event=died service=prefill-0")
    assert complete(client, LONG_PROMPT)[0] == text

    # When the router is killed, then it is back at the same address, with both workers
    os.kill(sluice.pid_of("router"), signal.SIGKILL)
    sluice.wait_for_line("event=up service=router", count=2)
    wait_until_complete(sluice, client, num_workers=2)
    assert complete(client, LONG_PROMPT)[0] == text

    # Then Ctrl-C ends all of it, the restarted processes too
    sluice.stop()


def wait_until_complete(sluice: Sluice, client: ApiClient, *, num_workers: int) -> None:
    """Wait, bounded by pytest, until ``num_workers`` are ready again."""
    while True:
        try:
            ready = [worker for worker in client.workers() if worker.state == "ready"]
        except UnreachableError:
            ready = []
        if len(ready) == num_workers:
            return
        with pytest.raises(subprocess.TimeoutExpired):
            sluice.child.wait(0.2)  # it must not end meanwhile


def test_sigterm_to_the_whole_group_leaves_nothing(sluice: Sluice) -> None:
    """``timeout`` and service managers signal Ray's processes too: they die under the driver.

    Ray then waits for ever for a cluster that is gone; the stop may not.
    """
    sluice.client()
    sluice.seen |= set(psutil.Process(sluice.child.pid).children(recursive=True))
    os.killpg(sluice.child.pid, signal.SIGTERM)
    assert sluice.child.wait(STOP_TIMEOUT_S) == 0
    _, alive = psutil.wait_procs(sluice.seen, timeout=STOP_TIMEOUT_S)
    assert alive == []
    assert list(sluice.ray_temp.iterdir()) == []


def test_commands_find_it_by_themselves_and_down_returns_when_nothing_of_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a deployment with a name and a port of its own
    (tmp_path / "models").symlink_to(cache_folder() / "models")
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sluice = Sluice("--set", "deploy.name=found", "--prefill", "0")
    try:
        url = sluice.client().url

        # When it is asked for without its address, then it is found, and so is what is unwise
        assert "decode-0" in command("status")
        too_many = psutil.virtual_memory().total // 2**30 + 1  # whose pools take 1 GiB each
        scaled = command("scale", f"decode={too_many}", "--name=found")
        assert "warning: cache: the pools" in scaled
        assert "found: taken" in command("scale", "decode=1", "--name=found")

        # When it is stopped, then its own process has ended, too
        assert command("down", "--name=found") == "found: stopped\n"
        assert sluice.child.poll() == 0
        with pytest.raises(UnreachableError):
            ApiClient(url).workers()
    finally:
        sluice.clean_up()


def command(*arguments: str) -> str:
    """Return what a command prints that succeeds."""
    done = subprocess.run(
        [sys.executable, "-m", "deploy.main", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
