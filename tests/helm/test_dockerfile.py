"""The image holds what it needs, from sources that are there: no Docker is at hand to build it."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helm.chart import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
LINES = DOCKERFILE.replace("\\\n", " ").splitlines()
COPIED = [
    (source, words[-1])
    for line in LINES
    if line.startswith("COPY ") and "--from" not in line
    for words in [line.split()[1:]]
    for source in words[:-1]
]


def lay_out(folder: Path) -> None:
    """Copy what the image's build copies, to where it copies it."""
    for source, target in COPIED:
        place = folder / (target if target.endswith("/") or target == "." else "")
        place.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(ROOT / source, folder / target, ignore=ignored)
        else:
            shutil.copy(ROOT / source, place)


def test_each_copied_source_is_in_the_repository_and_passes_dockerignore() -> None:
    passed = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert {source for source, _ in COPIED} == passed
    for source in passed:
        assert (ROOT / source).exists(), source


def test_all_packages_of_the_project_are_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["importlinter"]["root_packages"])
    assert packages <= {source for source, _ in COPIED}


def test_every_folder_of_modules_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    roots = {*project["tool"]["importlinter"]["root_packages"], "bench"}
    found = project["tool"]["setuptools"]["packages"]["find"]
    assert {name.rstrip("*") for name in found["include"]} == roots
    folders = {module.parent for root in roots for module in (ROOT / root).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.timeout(500)
def test_what_is_copied_installs_and_runs(tmp_path: Path) -> None:
    lay_out(tmp_path / "app")
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    install += ["--no-deps", "--no-build-isolation", "--no-index", "--target", tmp_path / "site"]
    result = subprocess.run(
        [*install, tmp_path / "app"], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    for arguments in (["version"], ["config", "reference"]):
        result = subprocess.run(
            [sys.executable, "-m", "deploy.main", *arguments],
            cwd=tmp_path / "site",
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, result.stderr
    assert list((tmp_path / "site" / "engine" / "native").glob("*.cpp")), "kernels compile there"


def test_the_image_is_pinned_runs_as_nobody_special_and_has_what_kuberay_calls() -> None:
    assert re.search(
        r"^ARG PYTHON_IMAGE=python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}$",
        DOCKERFILE,
        re.MULTILINE,
    )
    assert [line for line in LINES if line.startswith("FROM ")] == [
        "FROM ${PYTHON_IMAGE} AS build",
        "FROM ${PYTHON_IMAGE}",
    ]
    assert "--require-hashes --no-deps --requirement requirements/cpu.lock" in DOCKERFILE
    assert LINES.index("USER 1000:1000") > LINES.index("FROM ${PYTHON_IMAGE}")
    final = DOCKERFILE.rpartition("FROM ")[2]
    assert {"bash", "g++", "libgomp1"} <= set(final.split())
