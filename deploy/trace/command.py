"""``sluice trace``: the way of one request through a running deployment, as a picture."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec
from rich.console import Console

from core.errors import ConfigError, SluiceError
from deploy.api_client import ApiClient
from deploy.trace.request import RequestTrace
from deploy.trace.svg import draw
from deploy.trace.terminal import print_trace

CONVERTER: Final = "rsvg-convert"
CONVERT_TIMEOUT_S: Final = 30.0
PIXELS: Final = 2160
"""Width of a PNG: twice the picture's own."""


class PictureError(SluiceError):
    """The picture could not be made from the trace."""


def run_trace(url: str, name: str, *, out: Path | None, choice: int | None = None) -> int:
    """Print what became of request ``name`` at the router at ``url``, and write it to ``out``.

    Args:
        url: The API's address.
        name: Of a response or of one of its sequences.
        out: By default an SVG file in the current folder, named after the sequence.
        choice: The index of the sequence to show; by default the one that is named, else the first.

    Raises:
        ConfigError: ``url`` is malformed, ``out`` is no file that can be written, or the request
            has no such ``choice``.
        SluiceError: nothing answers, the request is unknown there, or a PNG can't be made here.
    """
    writer = None if out is None else _writer(out)
    client = ApiClient(url.rstrip("/").removesuffix("/v1"), timeout_s=15.0)
    trace = _chosen(client, client.get(f"/v1/trace/{quote(name)}", RequestTrace), choice)
    console = Console()
    print_trace(trace, console)
    out = out or Path(f"{trace.request_id}.svg")
    (writer or _write_svg)(trace, out)
    console.print(f"picture: {out}", highlight=False, soft_wrap=True)
    return 0


def _chosen(client: ApiClient, trace: RequestTrace, choice: int | None) -> RequestTrace:
    """Return the trace of the ``choice`` beside ``trace``."""
    if choice is None:
        return trace
    choices = trace.choices
    if choice >= len(choices):
        what = "one choice, 0" if len(choices) == 1 else f"choices 0 to {len(choices) - 1}"
        raise ConfigError(f"--choice {choice}: the request has {what}; give one of them")
    if choices[choice] == trace.request_id:
        return trace
    return client.get(f"/v1/trace/{quote(choices[choice])}", RequestTrace)


def _writer(out: Path) -> Callable[[RequestTrace, Path], None]:
    writers = {".svg": _write_svg, ".png": write_png, ".json": _write_json}
    writer = writers.get(out.suffix.lower())
    if writer is None:
        raise ConfigError(f"--out {out}: end it in {', '.join(writers)}")
    if writer is write_png and shutil.which(CONVERTER) is None:
        raise ConfigError(
            f"--out {out}: a PNG needs {CONVERTER} (Debian: librsvg2-bin); or write an .svg"
        )
    return writer


def _write_svg(trace: RequestTrace, out: Path) -> None:
    _write(out, draw(trace))


def _write_json(trace: RequestTrace, out: Path) -> None:
    _write(out, json.dumps(msgspec.to_builtins(trace), indent=1) + "\n")


def write_png(trace: RequestTrace, out: Path) -> None:
    """Write the picture of ``trace`` as a PNG.

    Raises:
        PictureError: the converter is not there, or failed.
    """
    command = [CONVERTER, "--width", str(PIXELS), "--output", str(out)]
    try:
        subprocess.run(  # noqa: S603 - a fixed program; the file's name is one argument
            command,
            input=draw(trace).encode(),
            check=True,
            capture_output=True,
            timeout=CONVERT_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode(errors="replace").strip()
        raise PictureError(f"--out {out}: {CONVERTER} failed: {words}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PictureError(f"--out {out}: {CONVERTER} failed: {error}") from error


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"{error.strerror}; give a file in a folder that can be written to"
        raise ConfigError(f"--out {out}: {reason}") from error
