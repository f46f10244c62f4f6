"""What both drivers of a deployment say and refuse, they say alike."""

import logging
from io import StringIO

import pytest
from rich.console import Console

from core.config import DeployConfig, SluiceConfig
from core.errors import ConfigError
from deploy.driver import not_ready, refuse_detached_in_private, tell


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
            url="http://a/v1",
        )
    assert caplog.messages == (["event=serving url=http://a/v1"] if is_quiet else [])
    assert out.getvalue() == ("" if is_quiet else "serving at http://a/v1\n")
