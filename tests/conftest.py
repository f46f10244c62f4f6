"""What every test leaves as it found it."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

# No test asserts a time: how long an example takes tells how busy the machine is.
settings.register_profile("sluice", deadline=None)
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
