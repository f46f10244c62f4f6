"""Commands that ask or change a deployment that runs already."""

import argparse
from pathlib import Path

from core.config import DeployConfig
from core.errors import ConfigError
from deploy.cli.arguments import (
    Commands,
    add_assignments,
    add_command,
    add_group,
    add_url,
    seconds,
    url_of,
)
from deploy.commands.cache import run_cache_reset, run_cache_show
from deploy.commands.scale import run_down, run_scale, run_undo, run_update
from deploy.commands.scale_arguments import MAX_SHOWN, parse_counts, parse_roles
from deploy.commands.status import run_status
from deploy.config.settings import load_settings
from deploy.top.command import MAX_INTERVAL_S, MIN_INTERVAL_S, run_top
from deploy.trace.command import run_trace

MAX_WAIT_S = 3600.0


def add_running_commands(commands: Commands) -> None:
    """Add all commands of this module."""
    _add_scale(commands)
    _add_update(commands)
    _add_down(commands)
    summary = "Show a running deployment's workers and load."
    add_url(add_command(commands, "status", _status, summary))
    _add_top(commands)
    _add_trace(commands)
    summary = "Show or reset a running deployment's prefix caches."
    _add_cache(add_group(commands, "cache", summary))


def _scale(arguments: argparse.Namespace) -> int:
    return run_scale(
        arguments.name,
        arguments.address,
        parse_counts(arguments.counts),
        parse_roles(arguments.roles),
    )


def _update(arguments: argparse.Namespace) -> int:
    named = {"deploy.name": arguments.name}
    if arguments.undo:
        if arguments.config is not None or arguments.assignments:
            raise ConfigError(
                "--undo goes back to the last config that served; leave out --config and --set"
            )
        return run_undo(load_settings(None, named, []).deploy.name, arguments.address)
    if arguments.config is None and not arguments.assignments:
        raise ConfigError(
            "say what to go by: --config FILE, or --set section.field=value; --undo goes back to "
            "the last other config that served"
        )
    config = load_settings(arguments.config, named, arguments.assignments)
    return run_update(config.deploy.name, arguments.address, config)


def _down(arguments: argparse.Namespace) -> int:
    return run_down(arguments.name, arguments.address, grace_s=arguments.grace)


def _status(arguments: argparse.Namespace) -> int:
    return run_status(url_of(arguments))


def _top(arguments: argparse.Namespace) -> int:
    return run_top(url_of(arguments), once=arguments.once, interval_s=arguments.interval)


def _trace(arguments: argparse.Namespace) -> int:
    return run_trace(
        url_of(arguments), arguments.request, out=arguments.out, choice=arguments.choice
    )


def _cache_reset(arguments: argparse.Namespace) -> int:
    return run_cache_reset(url_of(arguments), wait_s=arguments.wait)


def _cache_show(arguments: argparse.Namespace) -> int:
    return run_cache_show(url_of(arguments))


def _add_scale(commands: Commands) -> None:
    summary = "Change a running deployment's numbers of workers."
    scale = add_command(commands, "scale", _scale, summary)
    scale.add_argument("counts", nargs="*", metavar="ROLE=N", help="such as prefill=3 decode=5")
    scale.add_argument(
        "--role",
        action="append",
        default=[],
        dest="roles",
        metavar="WORKER=ROLE",
        help="have one worker change its role, such as prefill-1=decode; may be repeated",
    )
    _add_deployment(scale, name=DeployConfig().name)


def _add_update(commands: Commands) -> None:
    summary = (
        "Have a running deployment go by a new config, one worker after the other. What it does "
        "not say is as by default, whatever was said before."
    )
    update = add_command(commands, "update", _update, summary)
    update.add_argument("--config", type=Path, metavar="FILE", help="YAML config file")
    add_assignments(update)
    update.add_argument(
        "--undo",
        action="store_true",
        help="go back to the last other config by which workers have served, with as many workers "
        "as are wanted now",
    )
    _add_deployment(update, name=None)


def _add_down(commands: Commands) -> None:
    summary = "Stop a running deployment, such as a detached one."
    down = add_command(commands, "down", _down, summary)
    down.add_argument(
        "--grace",
        type=_wait_s,
        default=5.0,
        metavar="S",
        help="seconds for it to end by itself; default: 5",
    )
    _add_deployment(down, name=DeployConfig().name)


def _add_deployment(parser: argparse.ArgumentParser, *, name: str | None) -> None:
    parser.add_argument(
        "--name", type=_deployment_name, default=name, help="deploy.name of the deployment"
    )
    parser.add_argument(
        "--address",
        metavar="A",
        help="of the Ray cluster; default: RAY_ADDRESS, else the deployment that this user runs "
        "on this machine, else the cluster of this machine",
    )


def _add_top(commands: Commands) -> None:
    summary = "Watch workers, KV blocks and latencies in a terminal."
    top = add_command(commands, "top", _top, summary)
    add_url(top)
    top.add_argument(
        "--once", action="store_true", help="print one picture, of one interval, and end"
    )
    top.add_argument(
        "--interval",
        type=_interval_s,
        default=2.0,
        metavar="S",
        help="seconds between two looks; default: %(default)g",
    )


def _add_trace(commands: Commands) -> None:
    trace = add_command(commands, "trace", _trace, "Show one request's way, as a picture.")
    trace.add_argument(
        "request", metavar="REQUEST", help="a response's id, or its x-request-id header"
    )
    trace.add_argument(
        "--choice",
        type=_choice,
        metavar="N",
        help="index of one of its choices, such as 1 where n was 2; default: the first",
    )
    add_url(trace)
    trace.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="FILE.svg, FILE.png or FILE.json; default: an SVG named after the request",
    )


def _add_cache(commands: Commands) -> None:
    add_url(add_command(commands, "show", _cache_show, "Blocks by state, hits by tier, evictions."))
    summary = "Forget every prefix computed up to now."
    reset = add_command(commands, "reset", _cache_reset, summary)
    add_url(reset)
    reset.add_argument(
        "--wait",
        type=_wait_s,
        default=0.0,
        metavar="S",
        help="seconds to wait until what was in use is over, too; default: do not wait",
    )


def _deployment_name(text: str) -> str:
    try:
        return DeployConfig(name=text).name
    except ValueError:
        message = (
            f"{text[:MAX_SHOWN]!r} is no deploy.name, which has 1 to 63 lower-case letters, digits "
            "and hyphens"
        )
        raise argparse.ArgumentTypeError(message) from None


def _choice(text: str) -> int:
    try:
        index = int(text)
    except ValueError:
        index = -1
    if index < 0:
        message = f"{text[:MAX_SHOWN]!r} is no index of a choice; the first is 0, then 1 and so on"
        raise argparse.ArgumentTypeError(message)
    return index


def _wait_s(text: str) -> float:
    return seconds(text, 0.0, MAX_WAIT_S)


def _interval_s(text: str) -> float:
    return seconds(text, MIN_INTERVAL_S, MAX_INTERVAL_S)
