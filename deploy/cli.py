"""The command line: arguments in, exit codes and one-line errors out."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn, get_args

from core.config import DeployConfig, SluiceConfig
from core.config_layers import ConfigLayer
from core.errors import ConfigError, SluiceError
from core.key_files import write_keys
from core.messages import Role
from deploy.cache_commands import MAX_WAIT_S, run_cache_reset, run_cache_show
from deploy.config_commands import run_config_check, run_config_reference, run_config_show
from deploy.doctor import run_doctor
from deploy.doctor_pair import Address, run_listen
from deploy.model_source import resolve_model
from deploy.ray_environment import prepare_ray_environment
from deploy.scale_commands import parse_counts, parse_roles, run_down, run_scale, run_update
from deploy.settings import load_settings, read_settings
from deploy.status import run_status
from deploy.top import MAX_INTERVAL_S, MIN_INTERVAL_S, run_top
from deploy.trace_command import run_trace

EXIT_FAILED = 1
EXIT_USAGE = 2
"""Nothing was started: a wrong argument, config value, file, folder or port."""
EXIT_INTERRUPTED = 130


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (try {self.prog} --help)\n")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML config file")
    parser.add_argument(
        "--model", metavar="M", help="model folder, hub id, or 'default' (SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--prefill", type=int, metavar="N", help="prefill workers; 0: colocated")
    parser.add_argument("--decode", type=int, metavar="N", help="decode workers")
    parser.add_argument("--host", metavar="H", help="address that the API listens on")
    parser.add_argument("--port", type=int, metavar="P", help="port of the API; 0: a free one")
    _add_assignments(parser)


def _add_assignments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="FIELD=VALUE",
        help="any field of the config, such as cache.block_size=32; may be repeated",
    )


def _settings(arguments: argparse.Namespace) -> SluiceConfig:
    return SluiceConfig.of(_layers(arguments))


def _layers(arguments: argparse.Namespace) -> ConfigLayer:
    return read_settings(
        arguments.config,
        {
            "model.model": arguments.model,
            "deploy.prefill": arguments.prefill,
            "deploy.decode": arguments.decode,
            "router.host": arguments.host,
            "router.port": arguments.port,
        },
        arguments.assignments,
    )


def _serve(arguments: argparse.Namespace) -> int:
    config = _settings(arguments)
    prepare_ray_environment(config.deploy, bare_output=config.log_format == "json")
    # Imported after it: Ray reads the environment when it is imported.
    from deploy.serve import run_serve  # noqa: PLC0415

    return run_serve(config)


def _demo(arguments: argparse.Namespace) -> int:
    config = _settings(arguments)
    prepare_ray_environment(config.deploy)
    from deploy.demo import run_demo  # noqa: PLC0415 - as above

    return run_demo(config)


def _scale(arguments: argparse.Namespace) -> int:
    return run_scale(
        arguments.name,
        arguments.address,
        parse_counts(arguments.counts),
        parse_roles(arguments.roles),
    )


def _update(arguments: argparse.Namespace) -> int:
    named = {"deploy.name": arguments.name}
    config = load_settings(arguments.config, named, arguments.assignments)
    return run_update(config.deploy.name, arguments.address, config)


def _down(arguments: argparse.Namespace) -> int:
    return run_down(arguments.name, arguments.address, grace_s=arguments.grace)


def _router(arguments: argparse.Namespace) -> int:
    config = _settings(arguments)
    # Imported here: no other command needs the router's packages.
    from deploy.router_command import run_router_command  # noqa: PLC0415

    return run_router_command(config)


def _workers(arguments: argparse.Namespace) -> int:
    config = _settings(arguments)
    prepare_ray_environment(config.deploy, bare_output=config.log_format == "json")
    from deploy.workers_command import run_workers_command  # noqa: PLC0415 - as for serve

    return run_workers_command(
        config, lambda: _settings(arguments), arguments.config, watch=arguments.watch
    )


def _status(arguments: argparse.Namespace) -> int:
    return run_status(arguments.url)


def _top(arguments: argparse.Namespace) -> int:
    return run_top(arguments.url, once=arguments.once, interval_s=arguments.interval)


def _cache_reset(arguments: argparse.Namespace) -> int:
    return run_cache_reset(arguments.url, wait_s=arguments.wait)


def _cache_show(arguments: argparse.Namespace) -> int:
    return run_cache_show(arguments.url)


def _trace(arguments: argparse.Namespace) -> int:
    return run_trace(arguments.url, arguments.request, out=arguments.out)


def _doctor(arguments: argparse.Namespace) -> int:
    config = load_settings(arguments.config, {}, arguments.assignments)
    if arguments.listen is not None:
        asked = config.for_role("prefill").transfer.transport
        return run_listen(asked, arguments.listen)
    with_config = arguments.config is not None
    return run_doctor(config, with_config=with_config, as_json=arguments.json, peer=arguments.peer)


def _config_check(arguments: argparse.Namespace) -> int:
    return run_config_check(arguments.file or arguments.file_again, arguments.assignments)


def _config_show(arguments: argparse.Namespace) -> int:
    return run_config_show(_layers(arguments), arguments.role)


def _config_reference(_arguments: argparse.Namespace) -> int:
    return run_config_reference()


def _fetch(arguments: argparse.Namespace) -> int:
    model = _settings(arguments).model
    sys.stdout.write(f"{resolve_model(model.model, model.revision).path}\n")
    return 0


def _keys(arguments: argparse.Namespace) -> int:
    for path in write_keys(arguments.folder):
        sys.stdout.write(f"{path}\n")
    return 0


def _version(_arguments: argparse.Namespace) -> int:
    try:
        version = metadata.version("sluice-llm")
    except metadata.PackageNotFoundError:
        version = "unknown (running from a folder, not installed)"
    sys.stdout.write(f"sluice {version}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="sluice",
        description="Serve one LLM from prefill and decode workers that hand KV blocks over UCX.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_settings(_add(commands, "serve", _serve, "Start router and workers; Ctrl-C stops them."))
    _add_settings(_add(commands, "demo", _demo, "Start, answer five prompts, show how, stop."))
    _add_settings(_add(commands, "router", _router, "Serve the API for workers elsewhere; no Ray."))
    workers = _add(commands, "workers", _workers, "Run workers for routers that run elsewhere.")
    _add_settings(workers)
    workers.add_argument(
        "--watch",
        action="store_true",
        help="follow the config file: scale to its numbers of workers, and replace the workers "
        "one by one after any other change",
    )
    _add_supervision(commands)
    _add_url(_add(commands, "status", _status, "Show a running deployment's workers and load."))
    _add_top(_add(commands, "top", _top, "Watch workers, KV blocks and latencies in a terminal."))
    _add_doctor(_add(commands, "doctor", _doctor, "Try out how KV will travel here, and why."))
    _add_trace(_add(commands, "trace", _trace, "Show one request's way, as a picture."))
    summary = "Show or reset a running deployment's prefix caches."
    cache = commands.add_parser("cache", help=summary, description=summary)
    _add_cache_commands(cache.add_subparsers(dest="subcommand", required=True, metavar="COMMAND"))
    summary = "Check or show a config, or print what every field means; start nothing."
    config = commands.add_parser("config", help=summary, description=summary)
    _add_config_commands(config.add_subparsers(dest="subcommand", required=True, metavar="COMMAND"))
    _add_settings(_add(commands, "fetch", _fetch, "Fetch the model; start nothing."))
    keys = _add(commands, "keys", _keys, "Make keys for security.keys_dir; start nothing.")
    keys.add_argument("folder", type=Path, metavar="DIR", help="made if it does not exist")
    _add(commands, "version", _version, "Print the version.")
    return parser


def _add_supervision(commands: "argparse._SubParsersAction[_OneLineParser]") -> None:
    scale = _add(commands, "scale", _scale, "Change a running deployment's numbers of workers.")
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
    update = _add(commands, "update", _update, "Replace all workers one by one, by a new config.")
    update.add_argument("--config", type=Path, metavar="FILE", help="YAML config file")
    _add_assignments(update)
    _add_deployment(update, name=None)
    down = _add(commands, "down", _down, "Stop a running deployment, such as a detached one.")
    down.add_argument("--grace", type=_wait_s, default=5.0, metavar="S", help="default: 5 s")
    _add_deployment(down, name=DeployConfig().name)


def _add_deployment(parser: argparse.ArgumentParser, *, name: str | None) -> None:
    parser.add_argument("--name", default=name, help="deploy.name of the deployment")
    parser.add_argument(
        "--address",
        metavar="A",
        help="of the Ray cluster; default: RAY_ADDRESS, else the deployment that this user runs "
        "on this machine, else the cluster of this machine",
    )


def _add_cache_commands(commands: "argparse._SubParsersAction[_OneLineParser]") -> None:
    _add_url(_add(commands, "show", _cache_show, "Blocks by state, hits by tier, evictions."))
    reset = _add(commands, "reset", _cache_reset, "Forget every prefix computed up to now.")
    _add_url(reset)
    reset.add_argument(
        "--wait",
        type=_wait_s,
        default=0.0,
        metavar="S",
        help="seconds to wait until what was in use is over, too; default: do not wait",
    )


def _add_config_commands(commands: "argparse._SubParsersAction[_OneLineParser]") -> None:
    check = _add(commands, "check", _config_check, "Every error with its line and fix; warnings.")
    files = check.add_mutually_exclusive_group(required=True)
    files.add_argument("file", type=Path, nargs="?", metavar="FILE", help="YAML config file")
    files.add_argument("--config", type=Path, dest="file_again", metavar="FILE", help="the same")
    _add_assignments(check)
    show = _add(commands, "show", _config_show, "What would hold, and where each value was given.")
    _add_settings(show)
    show.add_argument("--role", choices=get_args(Role), help="what workers of one role go by")
    _add(commands, "reference", _config_reference, "Every field: type, unit, default, meaning.")


def _add_top(parser: argparse.ArgumentParser) -> None:
    _add_url(parser)
    parser.add_argument(
        "--once", action="store_true", help="print one picture, of one interval, and end"
    )
    parser.add_argument(
        "--interval",
        type=_interval_s,
        default=2.0,
        metavar="S",
        help="seconds between two looks; default: %(default)g",
    )


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML config file, to be checked as well"
    )
    _add_assignments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    pair = parser.add_mutually_exclusive_group()
    for option, text in (
        ("--listen", "do nothing but have another machine read from here"),
        ("--peer", "also read from the machine that listens there"),
    ):
        pair.add_argument(option, type=Address.parse, metavar="HOST:PORT", help=text)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request", metavar="REQUEST", help="a response's id, or its x-request-id header"
    )
    _add_url(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="FILE.svg, FILE.png or FILE.json; default: an SVG named after the request",
    )


def _wait_s(text: str) -> float:
    return _seconds(text, 0.0, MAX_WAIT_S)


def _interval_s(text: str) -> float:
    return _seconds(text, MIN_INTERVAL_S, MAX_INTERVAL_S)


def _seconds(text: str, least: float, most: float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not least <= seconds <= most:
        message = f"{text!r} is not a number of seconds from {least:g} to {most:g}"
        raise argparse.ArgumentTypeError(message)
    return seconds


def _add(
    commands: "argparse._SubParsersAction[_OneLineParser]",
    name: str,
    action: Callable[[argparse.Namespace], int],
    summary: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(action=action)
    return command


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")


def run(argv: Sequence[str]) -> int:
    """Carry out one command line and return its exit code.

    A ``ConfigError`` is the operator's to fix: one line on stderr, exit code 2. Any other error
    of ours is one line and exit code 1.
    """
    try:
        arguments = _parser().parse_args(argv)
        return arguments.action(arguments)
    except ConfigError as error:
        _report(error)
        return EXIT_USAGE
    except SluiceError as error:
        _report(error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left; stdout's flush at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _report(error: SluiceError) -> None:
    sys.stderr.write(f"sluice: error: {' '.join(str(error).split())}\n")
