"""One generation from prefill to decode, and whether the metrics say so: `helm test`."""

# ruff: noqa: S310, T201

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

URL = os.environ["SLUICE_URL"].rstrip("/")
EXPECTED_PATH = os.environ.get("EXPECTED_PATH", "disaggregated")
TIMEOUT_S = float(os.environ.get("TIMEOUT_S", "600"))
RETRY_S = 2.0
LONG_PROMPT = " ".join(f"The lighthouse keeper wrote line {n} of the log." for n in range(100))
LABELS = {"disaggregated": "disagg", "local": "local"}
"""What the metric calls the paths."""
COUNTER = re.compile(r"^(sluice_route_decisions_total\{[^}]*\}) (\S+)$", re.MULTILINE)


def api_key() -> str | None:
    """Return the first key of the mounted file, where the API asks for one."""
    path = os.environ.get("API_KEYS_FILE")
    lines = Path(path).read_text().split() if path else []
    return lines[0] if lines else None


def fetch(path: str, body: dict[str, object] | None = None, timeout_s: float = 10.0) -> str:
    """Return the text of an answer."""
    headers = {"Content-Type": "application/json", "x-sluice-stats": "1"}
    if key := api_key():
        headers["Authorization"] = f"Bearer {key}"
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(URL + path, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return answer.read().decode()


def wait_ready(deadline: float) -> None:
    """Return when a generation can pass, by way of a prefill worker if that is what is expected."""
    while (lack := lacking()) is not None:
        if time.monotonic() > deadline:
            raise SystemExit(f"not ready within {TIMEOUT_S:.0f} s: {lack}")
        print(f"not ready yet: {lack}", flush=True)
        time.sleep(RETRY_S)


def lacking() -> str | None:
    """Return what a generation has to wait for; None: nothing."""
    try:
        ready = json.loads(fetch("/readyz"))
    except OSError as error:
        return str(error)
    if EXPECTED_PATH == "disaggregated" and not ready["prefill"]:
        return "no prefill worker is ready"
    return None


def generate(deadline: float) -> str:
    """Return by which path one completion came."""
    model = json.loads(fetch("/v1/models"))["data"][0]["id"]
    # A word of its own in front: no cached prefix may answer for the prefill workers.
    prompt = f"{time.time_ns()} {os.environ.get('PROMPT') or LONG_PROMPT}"
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = json.loads(fetch("/v1/completions", body, max(1.0, deadline - time.monotonic())))
    tokens = answer["usage"]["completion_tokens"]
    if tokens < 1:
        raise SystemExit(f"no token came: {answer}")
    print(f"{tokens} tokens of {model}: {answer['sluice']}")
    return answer["sluice"]["path"]


def main() -> int:
    """Wait, generate, and look at what the metrics made of it."""
    deadline = time.monotonic() + TIMEOUT_S
    try:
        wait_ready(deadline)
        path = generate(deadline)
        if path != EXPECTED_PATH:
            print(f"the request went by {path!r}, not {EXPECTED_PATH!r}", file=sys.stderr)
            return 1
        label = f'path="{LABELS[path]}"'
        # Behind a Service another replica may answer each time.
        while True:
            counts = dict(COUNTER.findall(fetch("/metrics")))
            if any(label in name and float(n) > 0 for name, n in counts.items()):
                print("the metrics have counted it")
                return 0
            if time.monotonic() > deadline:
                print(f"no router has counted a {path} request: {counts}", file=sys.stderr)
                return 1
            time.sleep(RETRY_S)
    except urllib.error.HTTPError as error:
        print(f"{error.url}: {error}: {error.read().decode()[:500]}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
