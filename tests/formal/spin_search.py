"""One exhaustive search of a Promela model by spin, in bounded memory and time."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

MODELS = Path(__file__).parent
MEMORY_MB = 1536
TIME_S = 110
DEPTH = 4_000_000

MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]


class Kind(Enum):
    """What is searched for; the values are the verifier's build and run options."""

    SAFETY = ("-DSAFETY",), ()
    """A violated assertion, or an end that is none."""
    CYCLE = ("-DNP",), ("-l",)
    """Any run that never ends."""
    LIVENESS = ("-DNFAIR=4",), ("-a", "-f")
    """A run that breaks the claim though every process that can go on does."""


@dataclass(frozen=True)
class Verdict:
    """What the search has found."""

    num_errors: int
    is_complete: bool
    """Whether no state was left out for want of depth, memory or time."""
    num_states: int
    error: str
    """The first violation, as spin words it."""


def search(
    folder: Path,
    model: str,
    *options: str,
    kind: Kind = Kind.SAFETY,
    claim: str | None = None,
    optimize: bool = True,
) -> Verdict:
    """Search ``model`` with macros ``options``; build in ``folder``.

    Without ``optimize`` the verifier is built sooner and runs slower: for errors that are near.

    Raises:
        CalledProcessError: the model is no Promela, or the verifier cannot be built.
        TimeoutExpired: the search took too long.
    """
    build_options, run_options = kind.value
    macros = [f"-D{option}" for option in options]
    shutil.copy(MODELS / model, folder / model)
    _run(folder, "spin", "-a", *macros, model)
    compression = ["-DCOLLAPSE", f"-DMEMLIM={MEMORY_MB}"]
    effort = "-O1" if optimize else "-O0"
    _run(folder, "gcc", effort, "-w", "-o", "pan", "pan.c", *compression, *build_options)
    chosen = () if claim is None else ("-N", claim)
    report = _run(folder, "./pan", f"-m{DEPTH}", "-w22", *run_options, *chosen)
    return _verdict(report)


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIME_S, check=False
    )
    if command[0] != "./pan":  # whose status tells of errors in the model, too
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def _verdict(report: str) -> Verdict:
    errors = re.search(r"errors: (\d+)", report)
    assert errors is not None, f"the verifier has said nothing: {report}"
    states = re.search(r"(\d+) states, stored", report)
    first = re.search(r"pan:1: (.+)", report)
    cut_short = ("max search depth too small", "out of memory", "reached -DMEMLIM", "truncated")
    return Verdict(
        num_errors=int(errors[1]),
        is_complete=not any(words in report for words in cut_short),
        num_states=int(states[1]) if states else 0,
        error=first[1] if first else "",
    )
