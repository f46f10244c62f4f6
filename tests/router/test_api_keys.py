"""Who has no key gets nothing, and probes and Prometheus need none.

The failures guarded against: a stranger who reads where the workers are, and an operator who is
locked out of what is his.
"""

import logging
from pathlib import Path

import openai
import pytest

from core.errors import ConfigError
from router.api_keys import ApiKeys
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.scripted_worker import say

OLD, NEW = "old-key-0123456789abcdef", "new-key-0123456789abcdef"
OPEN = ["/health", "/livez", "/ready", "/readyz", "/metrics"]
CLOSED = [
    "/status",
    "/status/",
    "//status",
    "/openapi.json",
    "/nothing",
    "/v1/models",
    f"/v1/models/{MODEL}",
    "/v1/cache",
    "/v1/trace/x",
    "/v1/nothing",
]


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\n{OLD}\n")
    return path


@pytest.fixture
async def keyed(start_router: StartRouter, keys_file: Path) -> RunningRouter:
    router = await start_router(security={"api_keys_file": str(keys_file)})
    router.operator = {"Authorization": f"Bearer {OLD}"}
    await router.start_worker(say([20, 21]))
    return router


async def test_probes_are_open_and_all_else_is_closed(keyed: RunningRouter) -> None:
    for path in OPEN:
        assert (await keyed.http.get(path)).status_code == 200, path
    for path in CLOSED:
        answer = await keyed.http.get(path)
        assert answer.status_code == 401, path
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/cache/reset"):
        assert (await keyed.http.post(path, json={})).status_code == 401, path


@pytest.mark.parametrize(
    "header", ["", "Bearer", f"Basic {OLD}", f"Bearer {OLD}x", f"Bearer {OLD[:-1]}", OLD]
)
async def test_what_is_almost_a_key_is_none(keyed: RunningRouter, header: str) -> None:
    answer = await keyed.http.get("/v1/models", headers={"Authorization": header})
    assert answer.status_code == 401
    assert OLD not in answer.text


async def test_openai_client_with_a_key_is_served_and_without_told_why(
    keyed: RunningRouter,
) -> None:
    served = keyed.openai.with_options(api_key=OLD)
    assert (await served.completions.create(model=MODEL, prompt="a", max_tokens=4)).choices
    with pytest.raises(openai.AuthenticationError, match="not valid"):
        await keyed.openai.completions.create(model=MODEL, prompt="a", max_tokens=4)


def test_a_changed_file_holds_within_a_second_and_a_spoiled_one_keeps_the_keys(
    keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    caplog.set_level(logging.INFO)
    keys = ApiKeys(keys_file, clock=lambda: now)
    assert keys.admits(OLD)
    assert not keys.admits(NEW)
    keys_file.write_text(f"{NEW}\n{OLD}-2\n")
    now = 1.1
    assert keys.admits(NEW)
    assert not keys.admits(OLD)
    for spoil in (lambda: keys_file.write_text("\n"), keys_file.unlink):
        spoil()
        now += 1.1
        assert keys.admits(NEW)
    assert sum("api_keys_kept" in record.getMessage() for record in caplog.records) == 2
    assert NEW not in caplog.text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "has no key"),
        ("# nothing\n", "has no key"),
        ("short\n", "line 1 is no key"),
        (f"{OLD}\ntwo words in one line\n", "line 2 is no key"),
        ("schlüssel-0123456789\n", "not ASCII"),
        (None, "No such file"),
    ],
)
def test_a_file_without_usable_keys_is_one_clear_error(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"security\.api_keys_file: .*keys: .*{reason}") as told:
        ApiKeys(path)
    assert OLD not in str(told.value)


async def test_a_router_whose_key_file_is_missing_does_not_start(
    start_router: StartRouter, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"security\.api_keys_file"):
        await start_router(security={"api_keys_file": str(tmp_path / "none")})
