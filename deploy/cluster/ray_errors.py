"""The gist of Ray's long messages. Which part of one that is depends on what was asked of Ray."""

MAX_CHARACTERS = 200
"""Of a message that a log line or another error repeats."""
DEAD = "The actor is dead because"
DETAIL = "Worker exit detail: "
UNEXPECTED = "Worker unexpectedly exits"
WITHOUT_A_WORD = (
    "its process ended without a word, such as killed for lack of memory (see dmesg) or by a fault "
    "in native code"
)


def why_died(error: Exception) -> str:
    """Return what has become of an actor.

    Ray cannot tell a kill for lack of memory from a crash, and tells a page about both.
    """
    for line in str(error).splitlines():
        if DEAD in line:
            if UNEXPECTED in line:
                return WITHOUT_A_WORD
            return (line.partition(DETAIL)[2] or line).strip()[:MAX_CHARACTERS]
    return _some_line(error, 0)


def last_line(error: Exception) -> str:
    """Return why a call failed: the exception is below its stack, and so is how an actor ended."""
    return _some_line(error, -1)


def on_one_line(error: Exception) -> str:
    """Return what a message begins with that has no line of its own for the gist.

    Such as why a cluster cannot be joined: its versions and ours are on several lines.
    """
    return " ".join(str(error).split())[:MAX_CHARACTERS] or type(error).__name__


def _some_line(error: Exception, index: int) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[index][:MAX_CHARACTERS] if lines else type(error).__name__
