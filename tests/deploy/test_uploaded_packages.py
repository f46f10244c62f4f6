"""What a driver on a machine of its own sends to a cluster: all that its workers import."""

import tomllib
from pathlib import Path

from deploy.cluster.session import PACKAGES, PROJECT_ROOT


def test_every_package_of_ours_is_sent_to_a_cluster() -> None:
    project = tomllib.loads(Path(PROJECT_ROOT, "pyproject.toml").read_text())
    assert set(PACKAGES) == set(project["tool"]["importlinter"]["root_packages"])
