"""Create the Secret of CURVE keys unless there is one: runs before an install or upgrade."""

# ruff: noqa: S310, T201

import base64
import json
import os
import ssl
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from core.key_files import write_keys

ACCOUNT = Path(os.environ.get("ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount"))
TIMEOUT_S = 30.0
CONFLICT = 409


def main() -> int:
    """Make the keys, post them, and take a conflict for success."""
    name, namespace = os.environ["SECRET_NAME"], os.environ["NAMESPACE"]
    with tempfile.TemporaryDirectory() as folder:
        keys = {path.name: path.read_bytes() for path in write_keys(Path(folder) / "keys")}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "data": {key: base64.b64encode(value).decode() for key, value in keys.items()},
    }
    request = urllib.request.Request(
        f"{os.environ['API_SERVER']}/api/v1/namespaces/{namespace}/secrets",
        data=json.dumps(secret).encode(),
        headers={
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text().strip()}",
            "Content-Type": "application/json",
        },
    )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    try:
        urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context).close()
    except urllib.error.HTTPError as error:
        if error.code != CONFLICT:
            print(f"cannot create secret {namespace}/{name}: {error}", file=sys.stderr)
            return 1
        print(f"secret {namespace}/{name} is there already and stays as it is")
        return 0
    except OSError as error:
        print(f"cannot reach {os.environ['API_SERVER']}: {error}", file=sys.stderr)
        return 1
    print(f"created secret {namespace}/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
