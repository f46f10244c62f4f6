"""One line of Ray's long messages is told, and it is the one that helps."""

from collections.abc import Callable

import pytest

from deploy.cluster.ray_errors import (
    MAX_CHARACTERS,
    WITHOUT_A_WORD,
    last_line,
    on_one_line,
    why_died,
)

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
    assert last_line(DIED) == "The actor is dead because it was killed by `ray.kill`."
    assert last_line(FAILED) == "ValueError: no such role"
    told = "Version mismatch: The cluster was started with: Ray: 2.9 Python: 3.9"
    assert on_one_line(UNLIKE) == told


EXITED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker "
    "exit detail: "
)
UNEXPECTED = (
    f"{EXITED}Worker unexpectedly exits with a connection error code 2. End of file. Some common "
    f"causes include: {'advice ' * 99}"
)
NODE = "The actor is dead because its node has died. Node Id: 4f"
KILLED = "The actor is dead because it was killed by `ray.kill`."


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        (KILLED, KILLED),
        (NODE, NODE),
        (UNEXPECTED, WITHOUT_A_WORD),
        (f"{EXITED}Worker exits by a signal 15.", "Worker exits by a signal 15."),
        ("Memory on the node was full", "The actor died unexpectedly before finishing this task."),
    ],
    ids=["killed", "node", "unexpected", "detail", "another"],
)
def test_of_an_actor_the_line_is_told_that_says_how_it_ended(ending: str, told: str) -> None:
    first = "The actor died unexpectedly before finishing this task."
    assert why_died(Exception(f"{first}\n\tpid: 1\n{ending}\n\tadvice\n")) == told


@pytest.mark.parametrize("gist", [why_died, last_line, on_one_line])
def test_an_error_without_words_is_told_by_its_kind(gist: Gist) -> None:
    assert gist(TimeoutError(" \n")) == "TimeoutError"


@pytest.mark.parametrize("gist", [why_died, last_line, on_one_line])
def test_no_gist_is_long(gist: Gist) -> None:
    assert len(gist(ValueError("\n" + "x" * 1000))) == MAX_CHARACTERS
