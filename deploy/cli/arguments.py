"""Arguments that several commands of the command line share, and what becomes of them."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from core.config import SluiceConfig
from core.config_layers import ConfigLayer
from deploy.commands.scale_arguments import MAX_SHOWN
from deploy.config.settings import read_settings
from deploy.exit_codes import EXIT_USAGE
from deploy.run_file import url_here

DEFAULT_URL = "http://127.0.0.1:8000"


class OneLineParser(argparse.ArgumentParser):
    """Tells a wrong argument in one line, with the command that it was given to."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse what a command does not know here: its parent would tell its own name."""
        known, unknown = super().parse_known_args(args, namespace)
        assert known is not None, "it makes one where it is given none"
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """End the program."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (try {self.prog} --help)\n")


class Commands(Protocol):
    """What commands are added to: argparse's own has no public name."""

    def add_parser(self, name: str, *, help: str, description: str) -> OneLineParser:  # noqa: A002
        """Return the parser of a new command."""
        ...


def add_command(
    commands: Commands, name: str, action: Callable[[argparse.Namespace], int], summary: str
) -> OneLineParser:
    """Add a command that runs ``action``, which returns the exit code."""
    command = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(action=action)
    return command


def add_group(commands: Commands, name: str, summary: str) -> Commands:
    """Add a command that has commands of its own, and return what those are added to."""
    group = commands.add_parser(name, help=summary, description=summary)
    return group.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add what ``settings_of`` reads."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML config file")
    parser.add_argument(
        "--model", metavar="M", help="model folder, hub id, or 'default' (SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--prefill", type=_whole, metavar="N", help="prefill workers; 0: colocated")
    parser.add_argument("--decode", type=_whole, metavar="N", help="decode workers")
    parser.add_argument("--host", metavar="H", help="address that the API listens on")
    parser.add_argument("--port", type=_whole, metavar="P", help="port of the API; 0: a free one")
    add_assignments(parser)


def add_assignments(parser: argparse.ArgumentParser) -> None:
    """Add ``--set``."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="FIELD=VALUE",
        help="any field of the config, such as cache.block_size=32; may be repeated",
    )


def settings_of(arguments: argparse.Namespace) -> SluiceConfig:
    """Return the config that ``add_settings``' arguments give.

    Raises:
        ConfigError: as ``SluiceConfig.of``.
    """
    return SluiceConfig.of(layers_of(arguments))


def layers_of(arguments: argparse.Namespace) -> ConfigLayer:
    """Return what ``settings_of`` validates."""
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


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add the API's address."""
    parser.add_argument(
        "--url",
        metavar="URL",
        help="of the API; default: of the deployment that this user runs on this machine, else "
        f"{DEFAULT_URL}",
    )


def url_of(arguments: argparse.Namespace) -> str:
    """Return the address that ``add_url``'s argument gives, or its default.

    Raises:
        ConfigError: several deployments run here, and none is named.
    """
    return arguments.url or url_here() or DEFAULT_URL


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:MAX_SHOWN]!r} is no whole number") from None


def seconds(text: str, least: float, most: float) -> float:
    """Return a number of seconds from ``least`` to ``most``.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        message = f"{text!r} is not a number of seconds from {least:g} to {most:g}"
        raise argparse.ArgumentTypeError(message)
    return number
