#!/usr/bin/env bash
# Print the first interpreter on PATH that can run Sluice, or say what is missing.
for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 python}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
        >/dev/null 2>&1; then
        command -v "$candidate"
        exit 0
    fi
done
echo "error: Sluice needs Python 3.11 or newer with the venv module; tried:" \
    "${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 python}." \
    "Install one, or name it: make PYTHON=/path/to/python3.11 ..." >&2
exit 1
