"""One line of Ray's long messages is told, and it is the one that helps."""

from collections.abc import Callable

import pytest

from deploy.cluster.ray_errors import MAX_CHARACTERS, first_line, last_line, on_one_line

Gist = Callable[[Exception], str]

DIED = Exception(
    "The actor died unexpectedly before finishing this task.\n"
    "\tclass_name: ServiceActor\n"
    "\tpid: 4711\n"
    "The actor is dead because it was killed by `ray.kill`.\n"
)
FAILED = Exception(
    "\x1b[36mray::Controller.apply()\x1b[39m (pid=4711, ip=10.0.0.1)\n"
    '  File "controller.py", line 1, in apply\n'
    "ValueError: no such role\n"
)
UNLIKE = Exception("Version mismatch: The cluster was started with:\n    Ray: 2.9\n  Python: 3.9\n")


def test_each_gist_is_the_part_that_says_most() -> None:
    assert first_line(DIED) == "The actor died unexpectedly before finishing this task."
    assert last_line(DIED) == "The actor is dead because it was killed by `ray.kill`."
    assert last_line(FAILED) == "ValueError: no such role"
    told = "Version mismatch: The cluster was started with: Ray: 2.9 Python: 3.9"
    assert on_one_line(UNLIKE) == told


@pytest.mark.parametrize("gist", [first_line, last_line, on_one_line])
def test_an_error_without_words_is_told_by_its_kind(gist: Gist) -> None:
    assert gist(TimeoutError(" \n")) == "TimeoutError"


@pytest.mark.parametrize("gist", [first_line, last_line, on_one_line])
def test_no_gist_is_long(gist: Gist) -> None:
    assert len(gist(ValueError("\n" + "x" * 1000))) == MAX_CHARACTERS
