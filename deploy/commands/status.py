"""``sluice status``: what a running deployment's router says of its workers."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from deploy.api_client import ApiClient, RouterStatus, WorkerStatus
from deploy.supervision.trouble import who_stays_down

EXIT_NOT_READY = 1
SILENCE_TOLD_S = 30.0
"""A controller speaks to each worker each second; one that is started anew is back before this."""


def run_status(url: str) -> int:
    """Print the workers of the router at ``url``; return 0 if it can serve, else 1.

    Raises:
        ConfigError: ``url`` is malformed.
        SluiceError: nothing answers there, or not a Sluice router.
    """
    url = url.rstrip("/").removesuffix("/v1")
    client = ApiClient(url)
    status = client.status()
    workers = status.workers
    model = client.json("/v1/models")["data"][0]["id"]
    ready = client.is_ready()
    console = Console()
    console.print(
        f"{url}: {model}, {'ready' if ready else 'not ready: no decode worker can serve'}",
        highlight=False,
    )
    console.print(_table(workers) if workers else "no worker reports to this router")
    if (missing := shortfall(status)) is not None:
        console.print(missing, highlight=False)
    if (update := progress(status)) is not None:
        console.print(update, highlight=False)
    for line in status.trouble:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if (unsupervised := silence(status)) is not None:
        console.print(unsupervised, highlight=False)
    console.print(f"metrics: {url}/metrics", highlight=False)
    for worker in workers:
        if worker.metrics_address and worker.state != "lost":
            console.print(
                f"metrics: {worker.metrics_address} ({worker.worker_id})", highlight=False
            )
    return 0 if ready else EXIT_NOT_READY


def shortfall(status: RouterStatus) -> str | None:
    """Return in one line how many workers are wanted and not ready; None: as many are as wanted."""
    wanted = status.desired or {}
    ready = [worker.role for worker in status.workers if worker.state == "ready"]
    short = [
        f"{ready.count(role)} of {number} {role}"
        for role, number in wanted.items()
        if ready.count(role) < number
    ]
    if not short:
        return None
    line = f"{', '.join(short)} ready"
    if status.trouble or silence(status) is not None:
        return line
    return f"{line}; the rest is starting, and what keeps one from it is told here"


def silence(status: RouterStatus) -> str | None:
    """Return in one line that the controller is silent; None: it is not, or nobody knows."""
    silence_s = status.controller_silence_s
    if silence_s is None or silence_s < SILENCE_TOLD_S:
        return None
    return (
        f"nobody supervises: the controller has been silent for {silence_s:.0f} s; requests go on, "
        "but no worker that dies is started anew "
        "(docs/operations.md#sluicecontrollersilent)"
    )


def progress(status: RouterStatus) -> str | None:
    """Return in one line how far an update is; None: all workers are by the wanted config."""
    wanted = status.desired or {}
    parts: list[str] = []
    is_stuck = True
    for role, revision in (status.desired_revisions or {}).items():
        there = [w for w in status.workers if w.role == role and w.state != "lost"]
        if revision and wanted.get(role) and any(w.revision != revision for w in there):
            num_new = sum(w.revision == revision and w.state == "ready" for w in there)
            parts.append(f"{num_new} of {wanted[role]} {role}")
            is_stuck &= _is_stuck(role, wanted[role], there, status.trouble)
    if not parts:
        return None
    return (
        f"update {'is stuck' if is_stuck else 'under way'}: {', '.join(parts)} ready by the wanted "
        "config; `sluice update --undo` (with its --name) goes back"
    )


def _is_stuck(
    role: str, num_wanted: int, workers: Sequence[WorkerStatus], trouble: Sequence[str]
) -> bool:
    """Return whether all that is missing of ``role`` stays down.

    One that loads reports nothing yet: beside one that stays down, another that an update with a
    ``max_surge`` above one has started is not seen.
    """
    if any(worker.state != "ready" for worker in workers):
        return False
    num_down = sum(name.startswith(f"{role}-") for name in who_stays_down(trouble))
    return num_down > 0 and num_wanted - len(workers) <= num_down


def _state(worker: WorkerStatus) -> str:
    if worker.state == "lost":
        return f"lost {worker.silent_s:.0f} s ago"
    return f"{worker.state}, suspect" if worker.suspect else worker.state


def _table(workers: list[WorkerStatus]) -> Table:
    table = Table("worker", "state", "revision")
    for name in ("running", "waiting", "queued tokens", "KV blocks free"):
        table.add_column(name, justify="right")
    for worker in sorted(workers, key=lambda worker: worker.worker_id):
        table.add_row(
            worker.worker_id,
            _state(worker),
            worker.revision,
            *_load(worker),
        )
    return table


def _load(worker: WorkerStatus) -> tuple[str, str, str, str]:
    if worker.state == "lost":
        return "-", "-", "-", "-"
    load = worker.load
    free = f"{load.free_blocks} / {load.total_blocks}"
    return str(load.running), str(load.waiting), str(load.queued_tokens), free
