"""What ``sluice`` tells the shell besides 0."""

from typing import Final

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
"""Nothing was started: a wrong argument, config value, file, folder or port."""
EXIT_INTERRUPTED: Final = 130
"""128 plus the number of SIGINT, as shells tell it."""
