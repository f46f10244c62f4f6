#!/usr/bin/env bash
# Resolve requirements/cpu.lock anew with uv, taken for this one run. UPGRADE=1 moves all versions.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$(bash requirements/find_python.sh)" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check uv
"$work/venv/bin/uv" pip compile pyproject.toml requirements/lock.in --extra dev \
    --excludes requirements/lock.excludes --universal --python-version 3.11 \
    --generate-hashes --no-annotate --custom-compile-command "make lock" \
    ${UPGRADE:+--upgrade} --quiet --output-file requirements/cpu.lock
echo "wrote requirements/cpu.lock: $(grep -c '==' requirements/cpu.lock) packages"
