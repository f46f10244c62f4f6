"""``sluice workers``: prefill and decode workers on Ray, for routers that run by themselves."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from core.config import SluiceConfig
from core.errors import ConfigError
from core.logs import set_up_logging
from deploy.cluster.session import ray_session
from deploy.config.watch import ConfigWatch
from deploy.driver import findable, not_ready, plan_of, refuse_detached_in_private, tell
from deploy.model_source import resolve_model
from deploy.supervision.events import EventQueue, StopRequested
from deploy.supervision.shortage import RoomWatch
from deploy.supervision.stop_signals import StopSignals
from deploy.supervision.supervisor import Supervisor

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
        ConfigError: a setting that such workers need is missing, or cannot be used.
        SluiceError: without ``watch``: not all became ready in time.
    """
    check(config, file, watch=watch)
    set_up_logging(config.log_level, worker="deploy", role="deploy", log_format=config.log_format)
    console = Console(stderr=True, quiet=config.log_format == "json")
    model = resolve_model(config.model.model, config.model.revision)
    events = EventQueue()
    signals = StopSignals(events)
    follower = ConfigWatch(file, load) if watch and file is not None else None
    with signals.installed(), ray_session(config.deploy) as session:
        signals.install()
        plan = plan_of(config, model, session, own_router=False)
        supervisor = Supervisor(plan, events, private=session.private)
        is_left = False
        try:
            is_left = _start(supervisor, config, console)
            with findable(config.deploy.name, session):
                if follower is not None:
                    console.print(f"following {file} (Ctrl-C stops)")
                    # Also when it ends by an error, such as a controller that stays down.
                    is_left = config.deploy.lifetime == "detached"
                    _follow(supervisor, follower, session.on_new_process)
                else:
                    is_left |= _run(supervisor, config, console, session.on_new_process)
        finally:
            if is_left:
                console.print("the workers go on by themselves; sluice down stops them")
                supervisor.leave()
            else:
                tell(console, "stopping ...", "stopping")
                supervisor.stop()
                tell(console, "stopped", "stopped")
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


def _start(supervisor: Supervisor, config: SluiceConfig, console: Console) -> bool:
    """Return whether the deployment ran before: then it goes on, whatever happens here."""
    if config.deploy.lifetime == "detached" and supervisor.resume():
        console.print(f"deployment {config.deploy.name!r} runs already")
        return True
    counts = f"{config.deploy.prefill} prefill, {config.deploy.decode} decode"
    console.print(f"starting {counts} worker(s) ...", highlight=False)
    supervisor.start()
    return False


def _follow(supervisor: Supervisor, watch: ConfigWatch, on_new_process: Callable[[], None]) -> None:
    supervisor.is_ready = True  # no worker's failure ends the rest: a change may mend it
    look_at = time.monotonic()
    room = RoomWatch(look_at)
    while True:
        event = supervisor.next_event(max(look_at - time.monotonic(), 0.0))
        if isinstance(event, StopRequested):
            return
        if event is not None:
            on_new_process()
        if time.monotonic() >= look_at:
            watch.look(supervisor.apply)
            look_at = time.monotonic() + LOOK_S
            if reason := room.look(look_at, supervisor.waits):
                log.warning("event=waits_for_room reason=%s", reason)


def _run(
    supervisor: Supervisor,
    config: SluiceConfig,
    console: Console,
    on_new_process: Callable[[], None],
) -> bool:
    """Return, with whether they go on, when the workers were told to stop or can be left."""
    if refusal := supervisor.apply(config):
        raise ConfigError(refusal)
    deadline = time.monotonic() + config.deploy.start_timeout_s
    while True:
        event = supervisor.next_event(None if supervisor.is_ready else LOOK_S / 4)
        if isinstance(event, StopRequested):
            return False
        if event is not None:
            on_new_process()
        if supervisor.is_ready:
            continue
        states = [row.state for row in supervisor.services()]
        if states.count("ready") >= sum(config.deploy.counts.values()):
            supervisor.is_ready = True
            console.print("all workers are ready", highlight=False)
            if config.deploy.lifetime == "detached":
                return True
        elif time.monotonic() > deadline:
            raise not_ready(config.deploy, supervisor.waits() or "workers still load")
