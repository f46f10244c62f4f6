"""The command line: arguments in, exit codes and one-line errors out.

Here are the commands that serve; the others are in ``running`` and ``preparing``.
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from core.errors import ConfigError, SluiceError
from deploy.cli.arguments import (
    Commands,
    OneLineParser,
    add_command,
    add_settings,
    settings_of,
)
from deploy.cli.importing import ended_by_ctrl_c
from deploy.cli.preparing import add_preparing_commands, name_and_version
from deploy.cli.running import add_running_commands
from deploy.cluster.environment import prepare_ray_environment
from deploy.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def run(argv: Sequence[str]) -> int:
    """Carry out one command line and return its exit code.

    A ``ConfigError`` is the operator's to fix: one line on stderr, exit code 2. Any other error
    of ours is one line and exit code 1.
    """
    try:
        return _carry_out(argv)
    except ConfigError as error:
        _report(error)
        return EXIT_USAGE
    except SluiceError as error:
        _report(error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _leave_output()
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _leave_output()
        _report(SluiceError(f"cannot write ({error.strerror}); make room, or write elsewhere"))
        return EXIT_FAILED


def _carry_out(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    code: int = arguments.action(arguments)
    sys.stdout.flush()  # at the process's end nobody could tell that there is no room for it
    return code


def _leave_output() -> None:
    """Have the rest of the output go nowhere: its flush at the end must not raise again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: SluiceError) -> None:
    sys.stderr.write(f"sluice: error: {' '.join(str(error).split())}\n")


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="sluice",
        description="Serve one LLM from prefill and decode workers that hand KV blocks over UCX.",
    )
    parser.add_argument(
        "--version", action="version", version=name_and_version(), help="print the version"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serving_commands(commands)
    add_running_commands(commands)
    add_preparing_commands(commands)
    return parser


def _add_serving_commands(commands: Commands) -> None:
    for name, action, summary in (
        ("serve", _serve, "Start router and workers; Ctrl-C stops them."),
        ("demo", _demo, "Start, answer five prompts, show how, stop."),
        ("router", _router, "Serve the API for workers elsewhere; no Ray."),
    ):
        add_settings(add_command(commands, name, action, summary))
    summary = "Run workers for routers that run elsewhere."
    workers = add_command(commands, "workers", _workers, summary)
    add_settings(workers)
    workers.add_argument(
        "--watch",
        action="store_true",
        help="follow the config file: scale to its numbers of workers, go by its limits, and "
        "replace the workers one by one after a change of what they go by",
    )


def _serve(arguments: argparse.Namespace) -> int:
    config = settings_of(arguments)
    prepare_ray_environment(config.deploy, bare_output=config.log_format == "json")
    # Imported after it: Ray reads the environment when it is imported.
    with ended_by_ctrl_c():
        from deploy.commands.serve import run_serve  # noqa: PLC0415

    return run_serve(config)


def _demo(arguments: argparse.Namespace) -> int:
    config = settings_of(arguments)
    prepare_ray_environment(config.deploy)
    with ended_by_ctrl_c():
        from deploy.commands.demo import run_demo  # noqa: PLC0415 - as above

    return run_demo(config)


def _router(arguments: argparse.Namespace) -> int:
    config = settings_of(arguments)
    # Imported here: no other command needs the router's packages.
    with ended_by_ctrl_c():
        from deploy.commands.router import run_router_command  # noqa: PLC0415

    return run_router_command(config)


def _workers(arguments: argparse.Namespace) -> int:
    config = settings_of(arguments)
    prepare_ray_environment(config.deploy, bare_output=config.log_format == "json")
    with ended_by_ctrl_c():
        from deploy.commands.workers import run_workers_command  # noqa: PLC0415 - as for serve

    return run_workers_command(
        config, lambda: settings_of(arguments), arguments.config, watch=arguments.watch
    )
