"""The files that the chart and an existing Grafana or Prometheus load."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from deploy.observability.alerts import RUNBOOKS, rules
from deploy.observability.overview import OVERVIEW
from deploy.observability.transfer_blocks import TRANSFER_BLOCKS
from deploy.observability.workers import WORKERS

DASHBOARDS: Final = (OVERVIEW, TRANSFER_BLOCKS, WORKERS)
RULES: Final = "alerts/sluice.yaml"
_HEAD: Final = "# Generated: python -m deploy.observability helm/sluice\n"


def render(*, runbooks: str = RUNBOOKS) -> Mapping[str, str]:
    """Return the text of each file by its path below a folder."""
    texts = {
        f"dashboards/{each.uid}.json": json.dumps(each.to_json(), indent=1) + "\n"
        for each in DASHBOARDS
    }
    return texts | {
        RULES: _HEAD + yaml.safe_dump(rules(runbooks=runbooks), sort_keys=False, width=100)
    }


def write(folder: Path, *, runbooks: str = RUNBOOKS) -> list[Path]:
    """Write all files below ``folder`` and return their paths."""
    paths: list[Path] = []
    for name, text in render(runbooks=runbooks).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        paths.append(path)
    return paths
