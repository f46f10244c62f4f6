"""``sluice doctor``: which transport, device and UCX workers here will really use, and how fast."""

import os
import sys
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from core.config import SluiceConfig
from deploy.doctor.config import check_config
from deploy.doctor.findings import Finding, Level, worst
from deploy.doctor.libraries import check_loaded, check_others, on_loader_path
from deploy.doctor.machine import Machine, check_machine
from deploy.doctor.pair import Address, check_pair
from deploy.doctor.paths import (
    check_devices,
    check_environment,
    check_local_path,
    check_remote_path,
    check_transport,
)
from deploy.doctor.peer import Seen
from deploy.doctor.trial import probe
from deploy.exit_codes import EXIT_FAILED

TCP_ONLY: Final = {"TLS": "tcp"}
_STYLE: Final[dict[Level, str]] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def run_doctor(
    config: SluiceConfig, *, with_config: bool, as_json: bool, peer: Address | None = None
) -> int:
    """Look at this machine, move bytes, print what was found; return 1 if anything fails, else 0.

    Args:
        config: Whose transport is tried.
        with_config: Whether its sizes are checked against this machine, too.
        as_json: One object on standard output instead of lines.
        peer: Another machine, to be read from as well.
    """
    machine = Machine()
    console = Console(stderr=as_json)
    asked = config.for_role("decode").transfer.transport
    with console.status("moving 64 MB between two processes ..."):
        seen = probe(asked, ucx_options={})
        tcp = probe(asked, ucx_options=TCP_ONLY)
        gpu = probe(asked, ucx_options={}, memory="cuda") if _has_gpu() else None
        is_lost = seen.error is not None and asked == "auto"
        first = probe("ucx", ucx_options={}) if is_lost else None
        pair = [] if peer is None else [check_pair(asked, peer, machine.usable_rdma_ports())]
    findings = [
        check_transport(asked, seen, os.environ, first=first),
        *pair,
        *_findings_of_paths(seen, tcp, gpu, machine),
        check_environment(os.environ),
        *check_machine(machine),
        *(check_config(config, machine) if with_config else []),
    ]
    level = worst(findings)
    if as_json:
        _print_json(findings, level, {"host": seen, "tcp": tcp} | ({"cuda": gpu} if gpu else {}))
    else:
        _print(findings, console)
    return EXIT_FAILED if level == "fail" else 0


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def _findings_of_paths(seen: Seen, tcp: Seen, gpu: Seen | None, machine: Machine) -> list[Finding]:
    if seen.error is not None:
        return []
    findings = [
        check_local_path(seen),
        check_remote_path(seen, tcp, machine.usable_rdma_ports()),
        check_devices(seen),
        check_loaded(seen.libraries),
        check_others(seen.libraries, on_loader_path(os.environ)),
    ]
    if gpu is not None:
        findings.insert(1, _check_gpu(gpu))
    return findings


def _check_gpu(seen: Seen) -> Finding:
    name = "GPU memory"
    if seen.error is not None:
        fix = "pools on GPUs can't be read from here: is this UCX built with CUDA?"
        return Finding(name, "fail", seen.error, fix)
    finding = check_local_path(seen)
    return Finding(name, finding.level, finding.text, finding.fix)


def _print(findings: list[Finding], console: Console) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        level = f"[{_STYLE[finding.level]}]{finding.level:<4}[/]"
        console.print(f"{level}  {finding.name:<{width}}  ", end="", highlight=False)
        console.print(finding.text, highlight=False, markup=False, soft_wrap=True)
        if finding.fix is not None:
            console.print(
                f"{'':<{width + 8}}-> {finding.fix}", highlight=False, markup=False, soft_wrap=True
            )


def _print_json(findings: list[Finding], level: Level, probes: dict[str, Seen]) -> None:
    content = {"level": level, "findings": findings, "probes": probes}
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(content), indent=1).decode() + "\n")
