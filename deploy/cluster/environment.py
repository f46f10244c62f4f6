"""What Ray reads from the environment when it is first imported. Imports no Ray itself."""

import os
import secrets

from core.config import DeployConfig


def cluster_address(config: DeployConfig) -> str | None:
    """Return the address of the Ray cluster to join; None: start a private one."""
    return named_cluster(config.ray_address)


def named_cluster(address: str | None) -> str | None:
    """Return the address of the Ray cluster that was named; None: none was.

    The environment's ``RAY_ADDRESS`` counts too: Ray sets it inside ``ray job submit``. ``local``
    is Ray's word for one to be started here.
    """
    named = address or os.environ.get("RAY_ADDRESS")
    return named if named and named != "local" else None


def prepare_ray_environment(config: DeployConfig, *, bare_output: bool = False) -> None:
    """Have Ray report no usage and print worker output as it is. Call before importing Ray.

    A private session listens on loopback only, and has a random key, so that no other user of this
    machine can run code in it. In the environment, the key is not written to the home folder.

    Args:
        config: Tells whether to join a cluster.
        bare_output: Print lines of workers without their process before each, as whatever reads
            lines of JSON needs.
    """
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_DEDUP_LOGS="0",
        RAY_COLOR_PREFIX="0",
        RAY_DISABLE_WORKER_LOG_PREFIX="1" if bare_output else "0",
    )
    if cluster_address(config) is None:
        _keep_private(os.environ.get("RAY_AUTH_TOKEN", secrets.token_hex(32)))


def prepare_asking_environment(token: str | None) -> None:
    """Have Ray join a cluster to ask something there. Call before importing Ray.

    Args:
        token: The key of a private session; None: the cluster is none.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if token is not None:
        _keep_private(token)


def _keep_private(token: str) -> None:
    # Despite its name, this alone makes Ray keep the loopback address that it is given.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = token
