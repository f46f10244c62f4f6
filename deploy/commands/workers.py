"""``sluice workers``: prefill and decode workers on Ray, for routers that run by themselves."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from core.config import SluiceConfig
from core.errors import ConfigError
from core.logs import set_up_logging
from deploy.config.watch import ConfigWatch
from deploy.driver import Driver, driving, refuse_detached_in_private
from deploy.supervision.shortage import RoomWatch
from deploy.supervision.stop_signals import StopInterrupt

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two looks at the config file, and at the workers while they start."""


def run_workers_command(
    config: SluiceConfig, load: Callable[[], SluiceConfig], file: Path | None, *, watch: bool
) -> int:
    """Run the workers of ``config`` until Ctrl-C or SIGTERM, or leave detached ones once ready.

    Where a detached deployment of this name runs already, it is given the config and followed.

    Args:
        config: What ``load`` returned.
        load: Reads the config again.
        file: Of the config.
        watch: Follow the file: changed numbers of workers are scaled to, any other change that is
            possible replaces the workers one by one, and one that is not is logged and ignored.
            Workers that cannot start then end nothing, since a change may mend them.

    Raises:
        ConfigError: a setting that such workers need is missing, or cannot be used, or a deployment
            that was taken over cannot go by ``config``.
        SluiceError: without ``watch``: not all became ready in time.
    """
    check(config, file, watch=watch)
    set_up_logging(config.log_level, worker="deploy", role="deploy", log_format=config.log_format)
    console = Console(stderr=True, quiet=config.log_format == "json")
    follower = ConfigWatch(file, load) if watch and file is not None else None
    try:
        with driving(config, console, own_router=False) as driver:
            is_detached = config.deploy.lifetime == "detached"
            is_taken_over = _resume_or_start(driver, console)
            # One that ran before goes on, whatever happens here.
            driver.is_left = is_taken_over
            if follower is not None:
                # Also when it ends by an error, such as a controller that stays down.
                driver.is_left |= is_detached
                how_it_ends = "Ctrl-C ends only that" if driver.is_left else "Ctrl-C stops"
                console.print(f"following {file} ({how_it_ends})")
                _follow(driver, follower)
            if is_taken_over and (refusal := driver.supervisor.apply(config)):
                raise ConfigError(refusal)
            _wait_until_ready(driver, config)
            console.print("all workers are ready", highlight=False)
            if is_detached:
                driver.is_left = True
            else:
                driver.wait_for_stop()
    except StopInterrupt:
        pass
    return 0


def check(config: SluiceConfig, file: Path | None, *, watch: bool) -> None:
    """Refuse what cannot work, before anything is started.

    Raises:
        ConfigError: names the setting.
    """
    if config.router.control_address is None:
        raise ConfigError(
            "router.control_address: not given, so the workers have no router to report to; give "
            "tcp://HOST:PORT of a `sluice router`, or use `sluice serve`, which starts one"
        )
    if config.security.keys_dir is None:
        raise ConfigError(
            "security.keys_dir: workers and a router of its own need common keys; make them "
            "with `sluice keys DIR`, and give DIR to both"
        )
    if watch and file is None:
        raise ConfigError("--watch: there is no file to follow; give --config FILE")
    refuse_detached_in_private(config)


def _resume_or_start(driver: Driver, console: Console) -> bool:
    """Take over the deployment if it runs already, else start it; return whether it was there."""
    deploy = driver.plan.deploy
    if deploy.lifetime == "detached" and driver.supervisor.resume():
        console.print(f"deployment {deploy.name!r} runs already")
        return True
    counts = f"{deploy.prefill} prefill, {deploy.decode} decode"
    console.print(f"starting {counts} worker(s) ...", highlight=False)
    driver.start()
    return False


def _wait_until_ready(driver: Driver, config: SluiceConfig) -> None:
    """Return once there are as many ready workers as ``config`` says.

    Raises:
        ConfigError: as ``Driver.wait_until_ready``.
        SluiceError: as ``Driver.wait_until_ready``.
    """
    wanted = sum(config.deploy.counts.values())

    def is_ready() -> bool:
        states = [row.state for row in driver.supervisor.services()]
        return states.count("ready") >= wanted

    driver.wait_until_ready(is_ready, lambda: "workers still load", LOOK_S / 4)


def _follow(driver: Driver, watch: ConfigWatch) -> NoReturn:
    """Apply what changes in the file until a stop is asked for.

    Raises:
        StopInterrupt: it is.
        SluiceError: the controller is gone for good.
    """
    driver.supervisor.tolerate_failures()  # a change of the file may mend it
    look_at = time.monotonic()
    room = RoomWatch(look_at)
    while True:
        driver.next_event(max(look_at - time.monotonic(), 0.0))
        if time.monotonic() < look_at:
            continue
        watch.look(driver.supervisor.apply)
        look_at = time.monotonic() + LOOK_S
        if reason := room.look(look_at, driver.supervisor.waits):
            log.warning("event=waits_for_room reason=%s", reason)
