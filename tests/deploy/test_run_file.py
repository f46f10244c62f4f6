"""The file by which commands find a deployment.

The failure guarded against: a deployment that is ready and serves ends because its file cannot be
written.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import ConfigError
from deploy.run_file import (
    RunningSession,
    announced,
    find_session,
    run_file,
    running_here,
    url_here,
    wait_end,
)

SESSION = RunningSession(address="127.0.0.1:1", token="", pid=os.getpid())
DEAD = replace(SESSION, pid=2**30)
"""Above any pid that Linux gives."""


def test_a_session_is_found_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    with announced("a", SESSION):
        assert find_session("a") == SESSION
        assert run_file("a").stat().st_mode & 0o777 == 0o600
    assert find_session("a") is None
    assert list(run_file("a").parent.iterdir()) == []


@pytest.mark.parametrize("below", ["", "run"])
def test_where_nothing_can_be_written_it_serves_on_and_says_so_in_one_line(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    (cache / below).parent.mkdir(exist_ok=True)
    (cache / below).write_text("no folder")
    monkeypatch.setenv("SLUICE_CACHE", str(cache))
    with announced("a", SESSION):
        pass
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "event=not_findable" in record.getMessage()
    assert str(cache) in record.getMessage()
    assert "SLUICE_CACHE" in record.getMessage()


def test_a_second_deployment_of_one_name_says_that_the_first_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    with announced("a", SESSION):
        assert not caplog.records
        with announced("a", replace(SESSION, address="127.0.0.1:2")):
            (record,) = caplog.records
    assert f"event=name_shared name=a pid={SESSION.pid}" in record.getMessage()
    assert find_session("a") is None


def test_those_that_run_here_are_named_and_neither_a_dead_one_nor_what_is_no_file_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    assert running_here() == {}
    with announced("b", SESSION), announced("a.1", SESSION), announced("c", DEAD):
        run_file("odd").write_text("no session")
        assert list(running_here()) == ["a.1", "b"]


def test_the_api_of_the_only_deployment_here_need_not_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    assert url_here() is None
    served = [replace(SESSION, url=f"http://127.0.0.1:{port}") for port in (9001, 9002)]
    with announced("workers-alone", SESSION):
        assert url_here() is None
        with announced("a", served[0]):
            assert url_here() == served[0].url
            told = "a at http://127.0.0.1:9001, b at http://127.0.0.1:9002; give --url"
            with announced("b", served[1]), pytest.raises(ConfigError, match=told):
                url_here()


def test_the_end_of_a_session_can_be_waited_for_though_nobody_has_reaped_its_driver() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    session = replace(SESSION, pid=child.pid)
    driver = session.driver()
    assert driver is not None
    assert not wait_end(driver, 0.2)
    assert child.stdin is not None
    child.stdin.close()
    assert wait_end(driver, 60)
    child.wait()
    assert wait_end(driver, 0)
    assert session.driver() is DEAD.driver() is None
