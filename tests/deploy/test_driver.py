"""What both drivers of a deployment say and refuse, they say alike."""

import errno
import logging
import os
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from core.config import DeployConfig, SluiceConfig
from core.errors import ConfigError
from deploy.cluster.session import RaySession
from deploy.driver import ended, how_to_stop, not_ready, plan_of, refuse_detached_in_private, tell
from deploy.model_source import ModelFolder


def test_a_start_that_takes_too_long_names_the_limit_and_what_is_missing() -> None:
    error = not_ready(DeployConfig(start_timeout_s=12.0), "missing: decode-1")
    assert str(error) == "not ready after 12 s (deploy.start_timeout_s); missing: decode-1"


def test_what_is_to_outlive_its_driver_needs_a_cluster_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    alone = SluiceConfig(deploy=DeployConfig(lifetime="detached"))
    with pytest.raises(ConfigError, match=r"deploy\.ray_address"):
        refuse_detached_in_private(alone)
    joined = DeployConfig(lifetime="detached", ray_address="10.0.0.1:6379")
    refuse_detached_in_private(SluiceConfig(deploy=joined))
    refuse_detached_in_private(SluiceConfig())


def test_what_goes_on_by_itself_names_the_command_that_stops_it() -> None:
    assert how_to_stop("sluice", None) == "sluice down"
    assert how_to_stop("sluice", "auto") == "sluice down --address auto"
    told = how_to_stop("user7", "10.0.0.1:6379")
    assert told == "sluice down --name user7 --address 10.0.0.1:6379"


@pytest.mark.parametrize("is_quiet", [False, True])
def test_where_lines_of_json_are_read_the_log_tells_what_people_are_told_elsewhere(
    *, is_quiet: bool, caplog: pytest.LogCaptureFixture
) -> None:
    out = StringIO()
    with caplog.at_level(logging.INFO, logger="deploy.driver"):
        tell(
            Console(file=out, quiet=is_quiet),
            "serving at http://a/v1",
            "serving",
            "http://a/v1",
        )
    assert caplog.messages == (
        ["event=deployment state=serving url=http://a/v1"] if is_quiet else []
    )
    assert out.getvalue() == ("" if is_quiet else "serving at http://a/v1\n")


class Unread(StringIO):
    """A terminal, pipe or file that takes nothing any more."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, _text: str) -> int:
        raise OSError(self._number, os.strerror(self._number))


def exit_as_rich_does(_console: Console) -> None:
    raise SystemExit(1)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("is_left", [False, True])
def test_a_deployment_is_stopped_or_left_though_it_cannot_be_said(
    *, is_left: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "on_broken_pipe", exit_as_rich_does)
    done: list[str] = []
    driver: Any = SimpleNamespace(
        is_left=is_left,
        supervisor=SimpleNamespace(
            stop=lambda: done.append("stop"), leave=lambda: done.append("leave")
        ),
    )
    with ended(driver, Console(file=Unread(number)), "sluice down"):
        pass
    assert done == ["leave" if is_left else "stop"]


def test_a_config_by_which_no_worker_starts_is_refused_before_a_controller_is_there() -> None:
    session = RaySession(
        private=True,
        address="127.0.0.1:1",
        driver_host="127.0.0.1",
        num_gpus=0.0,
        temp_folder=None,
        on_new_process=lambda: None,
    )
    config = SluiceConfig.model_validate({"model": {"device": "cuda"}})
    with pytest.raises(ConfigError, match=r"model\.device: cuda, but Ray sees no GPU"):
        plan_of(config, ModelFolder(Path("/model"), "model"), session)
