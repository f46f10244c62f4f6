"""A cluster of the tests is the same whatever ran before it in this process.

The failure guarded against: a test of a session of its own after which no second node joins any
cluster, since what that session has said to Ray is still in the environment.
"""

import os
from pathlib import Path

import pytest

from core.config import DeployConfig
from deploy.cluster.environment import prepare_ray_environment
from tests.deploy.ray_cluster import RayCluster


def test_a_cluster_goes_by_nothing_that_a_session_before_it_has_said_to_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    alone = RayCluster(tmp_path).environment
    prepare_ray_environment(DeployConfig())
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert RayCluster(tmp_path).environment == alone


def test_what_a_test_has_said_to_ray_is_taken_back_after_it() -> None:
    """By what runs in this process: the one before this has said it."""
    assert os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0"
