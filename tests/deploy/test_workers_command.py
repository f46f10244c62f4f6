"""``sluice workers`` and ``sluice router`` as commands, with common keys and the default model.

The failures guarded against: a change of the config file that costs a request, one that cannot be
and ends what runs, and a deployment that cannot be begun for a reason it does not tell.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import yaml

from core.errors import SluiceError
from core.key_files import write_keys
from deploy.api_client import ApiClient, UnreachableError
from deploy.cli.parser import run
from deploy.default_model import DEFAULT_MODEL_NAME
from deploy.model_source import cache_folder
from tests.free_ports import free_port

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
PROMPT = "The herons stand on the north rocks before the fog comes. " * 12

needs_model = pytest.mark.skipif(
    not (cache_folder() / "models" / DEFAULT_MODEL_NAME).is_dir(),
    reason="the default model is not in the cache; run: sluice fetch",
)


@pytest.mark.parametrize(
    ("settings", "arguments", "said"),
    [
        ({}, [], "router.control_address: not given"),
        (
            {"router": {"control_address": "tcp://127.0.0.1:9"}},
            [],
            "security.keys_dir: workers and a router of its own need common keys",
        ),
        (
            {
                "router": {"control_address": "tcp://127.0.0.1:9"},
                "security": {"keys_dir": "/nowhere"},
                "deploy": {"lifetime": "detached"},
            },
            [],
            "deploy.lifetime=detached: a Ray session of its own ends",
        ),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_starts(
    settings: dict[str, object],
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    assert run(["workers", "--config", str(path), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


class Fleet:
    """A router and its workers as two commands, and the file that both go by."""

    def __init__(self, folder: Path) -> None:
        port, control = free_port(), free_port()
        write_keys(folder / "keys")
        self.file = folder / "config.yaml"
        self.config: dict[str, dict[str, object]] = {
            "router": {
                "port": port,
                "control_port": control,
                "control_address": f"tcp://127.0.0.1:{control}",
            },
            "security": {"keys_dir": str(folder / "keys")},
            "engine": {"num_threads": 1},
            "scheduler": {"max_batch_tokens": 512},
        }
        self.write()
        self.client = ApiClient(f"http://127.0.0.1:{port}", timeout_s=TIMEOUT_S)
        self.log = folder / "workers.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.start("router", folder / "router.log")
        self.workers = self.start("workers", self.log, "--watch")

    def write(self) -> None:
        """Replace the file, as a mounted one is replaced."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump(self.config))
        fresh.replace(self.file)

    def start(self, command: str, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command with the file."""
        argv = [sys.executable, "-m", "deploy.main", command, "--config", str(self.file)]
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        with log.open("w") as out:
            process = subprocess.Popen(
                [*argv, *arguments], cwd=ROOT, stdout=out, stderr=out, env=environment
            )
        self._processes.append(process)
        return process

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait, bounded, until something holds."""
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            assert self.workers.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"{what}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.2)

    def ready(self) -> set[str]:
        """Return the ready workers as the router sees them."""
        try:
            return {str(w.worker_id) for w in self.client.workers() if w.state == "ready"}
        except UnreachableError:
            return set()

    def told(self, text: str) -> int:
        """Return how often the log says ``text``."""
        return self.log.read_text().count(text)

    def stop(self) -> int:
        """Press Ctrl-C at the workers, end the router, and return the workers' exit code."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGINT)
        return self.workers.wait(TIMEOUT_S)

    def clean_up(self) -> None:
        """End what a failed test leaves."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@pytest.fixture
def fleet(tmp_path: Path) -> Generator[Fleet]:
    running = Fleet(tmp_path)
    yield running
    running.clean_up()


class Client(threading.Thread):
    """Streams the same completion again and again, and keeps every text and every failure."""

    def __init__(self, api: ApiClient) -> None:
        super().__init__(daemon=True)
        self._api = api
        self.done = threading.Event()
        self.texts: list[str] = []
        self.failures: list[str] = []

    def run(self) -> None:
        body = {
            "model": DEFAULT_MODEL_NAME,
            "prompt": PROMPT,
            "max_tokens": 24,
            "temperature": 0,
            "stream": True,
        }
        while not self.done.is_set():
            try:
                chunks = list(self._api.stream("/v1/completions", body))
            except SluiceError as error:
                self.failures.append(repr(error))
                continue
            text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
            if any("error" in chunk for chunk in chunks):
                self.failures.append(json.dumps(chunks)[-500:])
            self.texts.append(text)


@pytest.mark.ray
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_model
def test_the_file_is_followed_and_a_client_never_notices(fleet: Fleet) -> None:
    fleet.wait("two workers", lambda: fleet.ready() == {"prefill-0", "decode-0"})
    client = Client(fleet.client)
    client.start()
    fleet.wait("a first answer", lambda: bool(client.texts))

    # When the file wants one more decode worker, then there is one more, and nobody was replaced
    fleet.config["deploy"] = {"decode": 2}
    fleet.write()
    fleet.wait("a second decode worker", lambda: {"decode-0", "decode-1"} < fleet.ready())
    assert fleet.told("event=drain") == 0

    # When a field of the workers changes, then new ones take the place of all three, one by one
    fleet.config["scheduler"]["max_batch_tokens"] = 256
    fleet.write()
    fleet.wait("three ends", lambda: fleet.told("event=over service=") == 3)
    fleet.wait("three workers", lambda: len(fleet.ready()) == 3)
    assert fleet.told("event=drain service=") == 3
    assert fleet.told("event=kill ") == 0

    # When the file is wrong, or wants what cannot be, then each is told in one line, once
    good = fleet.file.read_text()
    fleet.file.write_text("scheduler: {max_batch_tokens: many}\n")
    fleet.wait("a line", lambda: fleet.told("event=config_ignored") == 1)
    fleet.config["security"]["keys_dir"] = "/nowhere"
    fleet.write()
    fleet.wait("a line", lambda: fleet.told("reason=security.keys_dir=/nowhere (it runs") == 1)
    fleet.file.write_text(good)
    time.sleep(5)  # two more looks: that nothing more is told has no event
    assert fleet.told("event=config_ignored") == 2
    fleet.wait("three workers", lambda: len(fleet.ready()) == 3)

    # Then no request has failed, and all answers are the same
    client.done.set()
    client.join(TIMEOUT_S)
    assert client.failures == []
    assert len(set(client.texts)) == 1
    assert fleet.stop() == 0
