"""What every test leaves as it found it."""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# No test asserts a time: how long an example takes, or to draw it, tells how busy the machine is.
settings.register_profile("sluice", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sluice")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Take back what a command that ran in this process has set up.

    Its stream ends with its test, and its level would change what later tests are told.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


@pytest.fixture(autouse=True)
def ray_environment_as_before() -> Iterator[None]:
    """Take back what a command that ran in this process has said to Ray.

    To what later tests start it would say, for one, that no second node can join.
    """
    before = _said_to_ray()
    yield
    for name in _said_to_ray().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _said_to_ray() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
