"""Copies of UCX: loaded, and lying where a loader could take them for ours."""

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from deploy.doctor.findings import Finding

_LIBRARY: Final = re.compile(r"libuc[pt][-.].*so|libuc[pt]\.so")
"""The libraries themselves; ``libuct_ib.so`` and the like are modules of one of them."""
_LISTED: Final = re.compile(r"=> (/\S+)$", re.MULTILINE)
LDCONFIG_TIMEOUT_S: Final = 10.0


def check_loaded(libraries: Iterable[str]) -> Finding:
    """Return whether a process that moves bytes has one copy of each library."""
    copies = sorted(file for file in libraries if _LIBRARY.match(Path(file).name))
    kinds = [Path(file).name[:6] for file in copies]
    text = ", ".join(copies) or "none"
    if len(kinds) == len(set(kinds)):
        return Finding("UCX that is loaded", "ok", text)
    fix = (
        "two copies in one process: handles of one hang in the other. Uninstall one of the "
        "packages, or name one file for all in SLUICE_UCX_LIBRARY"
    )
    return Finding("UCX that is loaded", "fail", text, fix)


def check_others(loaded: Iterable[str], found: Iterable[str]) -> Finding:
    """Return whether there are copies that other libraries of a worker could load."""
    mine = {os.path.realpath(file) for file in loaded}
    others = sorted({os.path.realpath(file) for file in found} - mine)
    if not others:
        return Finding("other copies of UCX", "ok", "none on the loader's path")
    fix = (
        "if another library of this process loads one of them, two copies meet: take it off "
        "LD_LIBRARY_PATH, or use it for everything by SLUICE_UCX_LIBRARY"
    )
    return Finding("other copies of UCX", "warn", ", ".join(others), fix)


def on_loader_path(environment: Mapping[str, str]) -> list[str]:
    """Return the copies in ``LD_LIBRARY_PATH`` and in the loader's own list."""
    folders = filter(None, environment.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    files = [file for folder in folders for file in Path(folder).glob("libuc[pt]*.so*")]
    listed = [Path(file) for file in _LISTED.findall(_ldconfig())]
    return [str(file) for file in (*files, *listed) if _LIBRARY.match(file.name)]


def _ldconfig() -> str:
    """Return the loader's list; empty where there is no such tool."""
    for tool in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        try:
            answer = subprocess.run(  # noqa: S603 - a fixed program
                [tool, "-p"],
                capture_output=True,
                text=True,
                check=False,
                timeout=LDCONFIG_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        return answer.stdout
    return ""
