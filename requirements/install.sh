#!/usr/bin/env bash
# Make .venv from the lock: requirements/install.sh PYTHON VENV STAMP
set -euo pipefail
python=$1 venv=$2 stamp=$3

say() { printf '==> %s\n' "$*"; }

if [ ! -x "$venv/bin/python" ]; then
    say "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
quiet=()
[ -t 1 ] || quiet=(-qq)  # pip's progress bars are for a terminal
say "1/3 locked packages (hash-checked)"
"${pip[@]}" install "${quiet[@]}" --require-hashes --no-deps -r requirements/cpu.lock
say "2/3 torch"
"${pip[@]}" install "${quiet[@]}" -r requirements/torch.txt
say "3/3 sluice itself"
"${pip[@]}" install "${quiet[@]}" --no-deps --no-build-isolation --editable .
"$venv/bin/python" -c 'import torch, transformers, ray, nixl_cu12' || {
    echo "error: the environment in $venv does not import; remove it and run make setup" >&2
    exit 1
}
rm -f "$venv"/.sluice-*
touch "$stamp"
