"""Entry point of ``sluice`` and of ``python -m deploy.main``.

Holds only ``main``: Ray pickles classes of ``__main__`` by value, so none may live here.
"""

import os
import sys
from pathlib import Path

from deploy.cli.importing import ended_by_ctrl_c
from deploy.exit_codes import EXIT_INTERRUPTED


def main() -> int:
    """Run the command line and return its exit code."""
    # Whoever has started us may have closed what nobody reads.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    try:
        with ended_by_ctrl_c():
            from deploy.cli.parser import run  # noqa: PLC0415

        return run(sys.argv[1:])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
