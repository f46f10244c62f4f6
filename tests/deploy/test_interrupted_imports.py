"""Ctrl-C while ``sluice`` imports what it needs, at each place where that takes its time.

The failure guarded against: a stack on the terminal. pydantic and Ray, amid their imports, turn
what a signal handler raises into an error of their own.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.exit_codes import EXIT_INTERRUPTED

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
PROGRAM = """
import os, signal, sys
from importlib.abc import MetaPathFinder

MODULE = sys.argv.pop(1)

class Interrupted(MetaPathFinder):
    # Meets Ctrl-C at the import of one module, and makes of it what pydantic does.
    def find_spec(self, name, path, target=None):
        if name == MODULE:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt as error:
                raise ValueError("a schema cannot be made") from error

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupted())
from deploy import main
sys.exit(main.main())
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("deploy.cli.parser", "version"),
        ("deploy.commands.serve", "serve"),
        ("deploy.commands.demo", "demo"),
        ("deploy.commands.router", "router"),
        ("deploy.commands.workers", "workers"),
    ],
)
def test_ctrl_c_amid_an_import_is_the_end_without_a_word(module: str, command: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (EXIT_INTERRUPTED, "", "")
