"""``python -m deploy.observability FOLDER``: write the dashboards and the alert rules there."""

import argparse
import sys
from pathlib import Path

from deploy.observability.alerts import RUNBOOKS
from deploy.observability.files import write


def main() -> None:
    """Write the files and name them."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.observability",
        description="Write Grafana dashboards and Prometheus alert rules.",
    )
    parser.add_argument("folder", type=Path, help="below which dashboards/ and alerts/ are written")
    parser.add_argument("--runbooks", default=RUNBOOKS, help="URL of docs/operations.md")
    asked = parser.parse_args()
    for path in write(asked.folder, runbooks=asked.runbooks):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
