"""An operator with a key is served by every command, at a real router that asks for one.

The failures guarded against: a command that forgot to send it, and a deployment that can never be
seen to be ready because its own driver is a stranger.
"""

import asyncio
from pathlib import Path

import pytest

from core.config import SluiceConfig
from core.messages import CacheState
from core.trace import Recorder
from deploy.api_client import FailedAnswerError
from deploy.cli.parser import run
from deploy.deployment import client_of
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.scripted_worker import say

KEY = "operator-key-0123456789abcdef"


@pytest.fixture
async def keyed(start_router: StartRouter, tmp_path: Path) -> RunningRouter:
    """Start a router that asks for a key, with a worker that answers everything."""
    (tmp_path / "keys").write_text(f"{KEY}\n")
    router = await start_router(security={"api_keys_file": str(tmp_path / "keys")})
    router.operator = {"Authorization": f"Bearer {KEY}"}
    state = CacheState({"free": 1, "fenced": 0, "quarantined": 0}, 0, 0, 0, 1, "done", ())
    recorder = Recorder(lambda: 1.0, max_requests=4)
    await router.start_worker(say([20, 21]), cache_state=state, recorder=recorder)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 4}
    headers = {"x-request-id": "mine", **router.operator}
    answer = await router.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    return router


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["top", "--once"],
        ["cache", "show"],
        ["cache", "reset"],
        ["trace", "mine"],
    ],
    ids=" ".join,
)
async def test_commands_send_the_key(
    keyed: RunningRouter,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # where a trace's picture goes
    arguments = [*command, "--url", keyed.address.http]
    monkeypatch.delenv("SLUICE_API_KEY", raising=False)
    assert await asyncio.to_thread(run, arguments) != 0
    assert "401" in capsys.readouterr().err
    monkeypatch.setenv("SLUICE_API_KEY", KEY)
    assert await asyncio.to_thread(run, arguments) == 0, capsys.readouterr().err
    assert KEY not in "".join(capsys.readouterr())


async def test_a_deployment_asks_its_own_router_with_a_key_of_its_file(
    keyed: RunningRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLUICE_API_KEY", raising=False)
    port = int(keyed.address.http.rpartition(":")[2])
    config = {"router": {"port": port}, "security": {"api_keys_file": str(tmp_path / "keys")}}
    client = client_of(SluiceConfig.parse(config, source="test"))
    (worker,) = await asyncio.to_thread(client.workers)
    assert worker.state == "ready"
    # As the demo asks, which waits for longer
    longer = client.with_timeout(9.0)
    assert (await asyncio.to_thread(longer.json, "/v1/models"))["data"][0]["id"] == MODEL
    stranger = client_of(SluiceConfig.parse({"router": {"port": port}}, source="test"))
    with pytest.raises(FailedAnswerError, match="401"):
        await asyncio.to_thread(stranger.workers)
