"""Entry point of ``sluice`` and of ``python -m deploy.main``.

Holds only ``main``: Ray pickles classes of ``__main__`` by value, so none may live here.
"""

import sys

from deploy.exit_codes import EXIT_INTERRUPTED


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        # Imported here: Ctrl-C amid the imports, which take a second, is no error to be shown.
        from deploy.cli.parser import run  # noqa: PLC0415

        return run(sys.argv[1:])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
