"""Commands that start nothing: what is done and looked at before a deployment runs."""

import argparse
import sys
from importlib import metadata
from pathlib import Path
from typing import get_args

from core.key_files import write_keys
from core.messages import Role
from deploy.cli.arguments import (
    Commands,
    add_assignments,
    add_command,
    add_group,
    add_settings,
    layers_of,
    settings_of,
)
from deploy.config.commands import run_config_check, run_config_reference, run_config_show
from deploy.config.settings import load_settings
from deploy.doctor.command import run_doctor
from deploy.doctor.pair import Address, run_listen
from deploy.model_source import resolve_model


def add_preparing_commands(commands: Commands) -> None:
    """Add all commands of this module."""
    _add_doctor(commands)
    summary = "Check or show a config, or print what every field means; start nothing."
    _add_config(add_group(commands, "config", summary))
    add_settings(add_command(commands, "fetch", _fetch, "Fetch the model; start nothing."))
    keys = add_command(commands, "keys", _keys, "Make keys for security.keys_dir; start nothing.")
    keys.add_argument("folder", type=Path, metavar="DIR", help="made if it does not exist")
    add_command(commands, "version", _version, "Print the version.")


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
    return run_config_show(layers_of(arguments), arguments.role)


def _config_reference(_arguments: argparse.Namespace) -> int:
    return run_config_reference()


def _fetch(arguments: argparse.Namespace) -> int:
    model = settings_of(arguments).model
    sys.stdout.write(f"{resolve_model(model.model, model.revision).path}\n")
    return 0


def _keys(arguments: argparse.Namespace) -> int:
    for path in write_keys(arguments.folder):
        sys.stdout.write(f"{path}\n")
    return 0


def name_and_version() -> str:
    """Return what is installed, in a few words."""
    try:
        return f"sluice {metadata.version('sluice-llm')}"
    except metadata.PackageNotFoundError:
        return "sluice unknown (running from a folder, not installed)"


def _version(_arguments: argparse.Namespace) -> int:
    sys.stdout.write(f"{name_and_version()}\n")
    return 0


def _add_doctor(commands: Commands) -> None:
    summary = "Try out how KV will travel here, and why."
    doctor = add_command(commands, "doctor", _doctor, summary)
    doctor.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML config file, to be checked as well"
    )
    add_assignments(doctor)
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    pair = doctor.add_mutually_exclusive_group()
    for option, text in (
        ("--listen", "do nothing but have another machine read from here"),
        ("--peer", "also read from the machine that listens there"),
    ):
        pair.add_argument(option, type=Address.parse, metavar="HOST:PORT", help=text)


def _add_config(commands: Commands) -> None:
    summary = "Every error with its line and fix; warnings."
    check = add_command(commands, "check", _config_check, summary)
    files = check.add_mutually_exclusive_group(required=True)
    files.add_argument("file", type=Path, nargs="?", metavar="FILE", help="YAML config file")
    files.add_argument("--config", type=Path, dest="file_again", metavar="FILE", help="the same")
    add_assignments(check)
    summary = "What would hold, and where each value was given."
    show = add_command(commands, "show", _config_show, summary)
    add_settings(show)
    show.add_argument("--role", choices=get_args(Role), help="what workers of one role go by")
    summary = "Every field: type, unit, default, meaning."
    add_command(commands, "reference", _config_reference, summary)
