"""``sluice top``: a running deployment as it is now, in a terminal."""

import http.client
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live

from core.errors import SluiceError
from core.ids import WorkerId
from deploy.api_client import ApiClient, WorkerStatus
from deploy.top.figures import Look, TopHistory
from deploy.top.samples import Samples
from deploy.top.view import TopView

SCRAPE_TIMEOUT_S: Final = 2.0
"""A worker that does not answer for so long is shown as such."""
MAX_SCRAPES: Final = 16
"""At once."""
MIN_INTERVAL_S: Final = 0.1
MAX_INTERVAL_S: Final = 3600.0


def run_top(url: str, *, once: bool, interval_s: float) -> int:
    """Show the deployment whose router is at ``url`` until Ctrl-C; return 0.

    Args:
        url: As of ``ApiClient``.
        once: Look twice, ``interval_s`` apart, print one picture and return; also done where the
            output is no terminal.
        interval_s: Between two looks.

    Raises:
        ConfigError: ``url`` is malformed.
        SluiceError: at the first look nothing answers there, or no Sluice router.
    """
    url = url.rstrip("/").removesuffix("/v1")
    client, history, console = ApiClient(url), TopHistory(), Console()
    with ThreadPoolExecutor(MAX_SCRAPES) as pool:
        figures = history.add(take_look(client, pool))
        if once or not console.is_terminal:
            _wait(interval_s)
            console.print(TopView(history.add(take_look(client, pool)), url))
            return 0
        view = TopView(figures, url, is_live=True)
        try:
            with Live(view, console=console, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(view, refresh=True)
                    _wait(interval_s)
                    try:
                        view = replace(
                            view, figures=history.add(take_look(client, pool)), stale_reason=""
                        )
                    except SluiceError as error:
                        view = replace(view, stale_reason=str(error))
        except KeyboardInterrupt:
            console.print(
                replace(view, is_live=False)
            )  # the last picture stays, where the shell goes on
    return 0


def take_look(client: ApiClient, pool: ThreadPoolExecutor) -> Look:
    """Return what the router and its workers say now.

    Raises:
        SluiceError: the router does not answer, or what answers is none.
    """
    status = client.status()
    workers = scrape_workers(status.workers, pool)
    return Look(
        at_s=time.monotonic(),
        status=status,
        is_ready=client.is_ready(),
        router=Samples(client.text("/metrics")),
        workers=workers,
    )


def scrape_workers(
    workers: Iterable[WorkerStatus], pool: ThreadPoolExecutor
) -> dict[WorkerId, Samples]:
    """Return the metrics of the workers that answer in time."""
    with_address = [worker for worker in workers if worker.metrics_address]
    found = pool.map(_scrape, [worker.metrics_address for worker in with_address])
    return {
        worker.worker_id: samples
        for worker, samples in zip(with_address, found, strict=True)
        if samples is not None
    }


def _scrape(address: str) -> Samples | None:
    """Return the metrics at ``address``, which gets no API key: it is a worker's."""
    try:
        parts = urlsplit(address)
        connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=SCRAPE_TIMEOUT_S
        )
        with closing(connection):
            connection.request("GET", parts.path)
            return Samples(connection.getresponse().read().decode())
    except (OSError, ValueError, http.client.HTTPException, SluiceError):
        return None


def _wait(seconds: float) -> None:
    """Wait; an interrupt ends it."""
    threading.Event().wait(seconds)
