# ruff: noqa: S310 - all URLs are ours
"""Prometheus' own programs: a server that scrapes what a test runs, and promtool."""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.free_ports import free_port

HOST = "127.0.0.1"
START_TIMEOUT_S = 100.0


def program(name: str) -> str:
    """Return the path of ``prometheus`` or ``promtool``; skip the test where there is none."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} on the path: install Prometheus (Debian: apt install prometheus)")
    return path


def promtool(*arguments: str | Path) -> str:
    """Run promtool; fail with what it says."""
    done = subprocess.run(
        [program("promtool"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def _get(self, path: str, **parameters: Any) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=60) as response:
            return json.load(response)["data"]

    def series(self, expr: str, *, last_s: float, step_s: float = 1.0) -> list[dict[str, Any]]:
        """Return the series of ``expr`` over the last seconds."""
        end = time.time()
        found = self._get(
            "/api/v1/query_range", query=expr, start=end - last_s, end=end, step=step_s
        )
        return found["result"]

    def rules(self) -> set[tuple[str, str]]:
        """Return each rule's name and health, once all have been evaluated."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            groups = self._get("/api/v1/rules")["groups"]
            found = {(rule["name"], rule["health"]) for each in groups for rule in each["rules"]}
            if all(health != "unknown" for _, health in found):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.2)

    def wait_scraped(self, num_targets: int, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when all targets have answered."""
        deadline = time.monotonic() + timeout_s
        while True:
            targets = self._get("/api/v1/targets")["activeTargets"]
            if sum(each["health"] == "up" for each in targets) == num_targets:
                return
            assert time.monotonic() < deadline, [each["lastError"] for each in targets]
            time.sleep(0.2)


@contextmanager
def serve(
    folder: Path, targets: Mapping[str, Sequence[str]], *, rules: str | None = None
) -> Iterator[Prometheus]:
    """Scrape ``targets`` (addresses by job) each half second, and keep it below ``folder``."""
    port = free_port(HOST)
    config = folder / "prometheus.yml"
    settings: dict[str, Any] = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
            for job, addresses in targets.items()
        ],
    }
    if rules is not None:
        (folder / "rules.yaml").write_text(rules)
        settings["rule_files"] = [str(folder / "rules.yaml")]
    config.write_text(yaml.safe_dump(settings))
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={HOST}:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    server = Prometheus(f"http://{HOST}:{port}")
    try:
        _wait_ready(server, process)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def _wait_ready(server: Prometheus, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/-/ready", timeout=2) as response:
                if response.status == 200:
                    return
        except OSError:
            pass
        assert process.poll() is None, "prometheus ended while starting"
        assert time.monotonic() < deadline, "prometheus is not ready"
        time.sleep(0.1)
