"""``python -m deploy.probe live|ready --port N``: the exec probe of a Ray worker's pod.

Runs every few seconds, so it imports next to nothing. One line says why a probe fails.
"""

import argparse
import contextlib
import http.client
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

RAYLET_PORT = 52365
"""Of the agent beside each raylet, which answers for it; Ray's default."""
RAYLET_PATH = "/api/healthz"
TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a port said; ``status`` None: it accepted, and no answer came in time."""

    status: int | None
    text: str


def ask(hosts: Iterable[str], port: int, path: str, *, timeout_s: float) -> Answer | None:
    """Return the answer of the first of ``hosts`` where ``port`` is open; None: nowhere."""
    for host in hosts:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        try:
            connection.connect()
        except OSError:
            continue
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return Answer(response.status, response.read(500).decode(errors="replace").strip())
        except (OSError, http.client.HTTPException) as error:
            return Answer(None, str(error) or type(error).__name__)
        finally:
            connection.close()
    return None


def why_not_live(hosts: Sequence[str], port: int, *, raylet_port: int, timeout_s: float) -> str:
    """Return why the pod is to be started anew; "": it lives.

    A pod whose raylet lives and in which no worker listens is waiting for one.
    """
    raylet = ask(["127.0.0.1"], raylet_port, RAYLET_PATH, timeout_s=timeout_s)
    if raylet is None or raylet.status != http.HTTPStatus.OK:
        return f"raylet: {_told(raylet)} (port {raylet_port})"
    worker = ask(hosts, port, "/livez", timeout_s=timeout_s)
    if worker is None or worker.status == http.HTTPStatus.OK:
        return ""
    return f"worker: {_told(worker)} (port {port})"


def why_not_ready(hosts: Sequence[str], port: int, *, timeout_s: float) -> str:
    """Return why the worker here is not ready; "": it is."""
    worker = ask(hosts, port, "/readyz", timeout_s=timeout_s)
    if worker is not None and worker.status == http.HTTPStatus.OK:
        return ""
    return f"worker: {_told(worker)} (port {port})"


def main(argv: Sequence[str] | None = None) -> int:
    """Probe, and return 0 or 1."""
    parser = argparse.ArgumentParser(prog="python -m deploy.probe", description=__doc__)
    parser.add_argument("kind", choices=("live", "ready"))
    parser.add_argument("--port", type=int, required=True, help="metrics.port of the worker")
    parser.add_argument("--raylet-port", type=int, default=RAYLET_PORT, help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds, of each answer")
    arguments = parser.parse_args(argv)
    hosts = own_hosts()
    if arguments.kind == "ready":
        reason = why_not_ready(hosts, arguments.port, timeout_s=arguments.timeout)
    else:
        reason = why_not_live(
            hosts,
            arguments.port,
            raylet_port=arguments.raylet_port,
            timeout_s=arguments.timeout,
        )
    sys.stdout.write(f"{reason or 'ok'}\n")
    return 1 if reason else 0


def own_hosts() -> list[str]:
    """Return where a worker of this machine may listen: it uses one address, not all."""
    hosts = ["127.0.0.1"]
    with contextlib.suppress(OSError):
        hosts += socket.gethostbyname_ex(socket.gethostname())[2]
    return list(dict.fromkeys(hosts))


def _told(answer: Answer | None) -> str:
    if answer is None:
        return "nothing listens"
    return answer.text if answer.status is None else f"{answer.status} {answer.text}"


if __name__ == "__main__":
    sys.exit(main())
