"""``sluice router``: a router of its own, without Ray. Workers elsewhere report to it."""

import asyncio
import logging
import signal

import uvloop

from core.config import SluiceConfig
from core.errors import ConfigError
from core.key_files import load_keys
from core.lifecycle import Lifecycle
from core.logs import set_up_logging
from deploy.cluster.ports import claim_port
from deploy.model_source import resolve_model
from router.server import RouterContext, run_router

log = logging.getLogger(__name__)


def run_router_command(config: SluiceConfig) -> int:
    """Serve until SIGTERM or Ctrl-C; then finish what is pending, for ``drain_timeout_s`` at most.

    A second signal ends it at once.

    Raises:
        ConfigError: a setting that a router of its own needs is missing, or cannot be used.
    """
    set_up_logging(config.log_level, worker="router", role="router", log_format=config.log_format)
    context = context_of(config)
    claim_port(context.host, context.control_port, field="router.control_port")
    uvloop.run(_serve(context))
    return 0


def context_of(config: SluiceConfig) -> RouterContext:
    """Return what such a router is told.

    Raises:
        ConfigError: as ``run_router_command``.
    """
    if config.security.keys_dir is None:
        raise ConfigError(
            "security.keys_dir: a router of its own and its workers need common keys; make them "
            "with `sluice keys DIR`, and give DIR to both"
        )
    if not config.router.control_port:
        raise ConfigError(
            "router.control_port: 0 is a port that no worker could find; give the one in "
            "router.control_address"
        )
    model = resolve_model(config.model.model, config.model.revision, with_weights=False)
    return RouterContext(
        config=config,
        model_path=model.path,
        served_name=config.model.served_name or model.served_name,
        keys=load_keys(config.security.keys_dir, "router"),
        host=config.router.host,
        control_port=config.router.control_port,
    )


async def _serve(context: RouterContext) -> None:
    lifecycle = Lifecycle()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _take_signal, lifecycle)
    bounding = asyncio.create_task(_bound(lifecycle, context.config.deploy.drain_timeout_s))
    try:
        await run_router(context, lifecycle)
    finally:
        bounding.cancel()


def _take_signal(lifecycle: Lifecycle) -> None:
    (lifecycle.stop if lifecycle.drain.is_set() else lifecycle.drain).set()


async def _bound(lifecycle: Lifecycle, timeout_s: float) -> None:
    """End a drain that takes too long."""
    await lifecycle.drain.wait()
    await asyncio.sleep(timeout_s)
    log.warning("event=drain_cut_short timeout_s=%g", timeout_s)
    lifecycle.stop.set()
