"""Entry point of ``sluice`` and of ``python -m deploy.main``.

Holds only ``main``: Ray pickles classes of ``__main__`` by value, so none may live here.
"""

import sys

from deploy.cli.parser import run


def main() -> int:
    """Run the command line and return its exit code."""
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
