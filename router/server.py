"""One router process: control channel, dispatcher and HTTP server, started and stopped as one."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvicorn

from core.channel import ChannelKeys
from core.config import SluiceConfig
from core.errors import ConfigError
from core.lifecycle import Lifecycle, Work
from core.messages import WorkerLoad
from core.trace import Recorder
from core.vllm_aliases import VllmAliases, total_load
from router.api import RouterAPI, create_app
from router.api_keys import ApiKeys
from router.connections import KEEP_ALIVE_S, BoundedConnection
from router.dispatch import Dispatcher
from router.draining import leave_from
from router.fleet import Fleet
from router.metrics import LatencyGoals, RouterMetrics
from router.model_card import ModelCard
from router.strangers import Strangers

log = logging.getLogger(__name__)

GRACE_S = 2
"""How long open connections have after everything pending was failed."""
BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """Where a running router is reached."""

    http: str
    """``http://host:port``, for clients."""
    control: str
    """``tcp://host:port``, for workers."""


def _ignore(_address: RouterAddress) -> None:
    """Nobody waits for the address."""


@dataclass(frozen=True, slots=True)
class RouterContext:
    """What a router process is told at its start."""

    config: SluiceConfig
    model_path: Path
    """A local folder with config and tokenizer."""
    served_name: str
    keys: ChannelKeys
    host: str
    """Address of this machine that workers reach."""
    control_port: int = 0
    revision: str = ""
    """Short name of what the router runs by."""
    on_ready: Callable[[RouterAddress], None] = _ignore
    """Called once, when both ports answer; workers may not have reported yet."""


async def run_router(context: RouterContext, lifecycle: Lifecycle) -> None:
    """Serve until ``stop`` is set; then fail what is pending and return within seconds.

    A drain ends when nothing is pending any more: see ``router.draining``.

    Raises:
        ConfigError: the model folder, the file of API keys, or a port cannot be used. Nothing is
            left open.
    """
    config = context.config
    card = ModelCard.load(
        context.model_path, name=context.served_name, max_model_len=config.model.max_model_len
    )
    keys_file = config.security.api_keys_file
    api_keys = None if keys_file is None else ApiKeys(keys_file)
    with _bound_socket(config.router.host, config.router.port) as http_socket:
        _bound_unread(http_socket, timeout_s=2 * config.router.write_timeout_s)
        metrics = RouterMetrics(
            LatencyGoals(ttft_s=config.router.slo_ttft_s, itl_s=config.router.slo_itl_s)
        )
        fleet = Fleet(
            config,
            host=context.host,
            control_port=context.control_port,
            keys=context.keys,
            metrics=metrics,
            probe_token_id=card.probe_token_id,
            recorder=Recorder(time.monotonic, max_requests=config.trace_requests),
            lifecycle=lifecycle,
        )
        dispatcher = Dispatcher(config, fleet, card.tokenizer, metrics, card.name)
        if config.metrics.vllm_aliases:
            _export_vllm_aliases(metrics, config, fleet, dispatcher)
        max_body_nbytes = config.router.max_body_mib * 2**20
        app = create_app(RouterAPI(card, fleet, dispatcher, metrics, max_body_nbytes), api_keys)
        server = _Server(_uvicorn_config(app))
        host, port = http_socket.getsockname()[:2]
        address = RouterAddress(f"http://{host}:{port}", fleet.address)
        log.info(
            "event=serving http=%s control=%s model=%s", address.http, address.control, card.name
        )
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=[http_socket]))
            reporting = group.create_task(fleet.run(dispatcher))
            context.on_ready(address)
            work = Work(fleet.incarnation, is_idle=lambda: dispatcher.admission.is_drained)
            delay_s = config.router.drain_delay_s
            leaving = group.create_task(
                leave_from(lifecycle.drain, dispatcher.admission, server, delay_s=delay_s)
            )
            await lifecycle.wait_end(work, serving, reporting)
            leaving.cancel()
            dispatcher.stop()
            server.should_exit = True
            await serving
            reporting.cancel()


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the router."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Capture none."""
        yield


def _export_vllm_aliases(
    metrics: RouterMetrics, config: SluiceConfig, fleet: Fleet, dispatcher: Dispatcher
) -> None:
    """Export the decode workers' load as one, as for a gateway the router is the endpoint."""

    def load() -> WorkerLoad:
        workers = fleet.registry.workers("decode")
        loads = [worker.heartbeat.load for worker in workers]
        return total_load(loads, num_waiting=dispatcher.num_unplaced)

    block_size = config.for_role("decode").cache.block_size
    metrics.registry.register(VllmAliases(dispatcher.model, load, block_size=block_size))


def _uvicorn_config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]
        http=partial(BoundedConnection, Strangers()),  # pyright: ignore[reportArgumentType]
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )


def _bound_unread(listening: socket.socket, *, timeout_s: float) -> None:
    """End connections whose client takes nothing for ``timeout_s``, where the system can (Linux).

    Closing one of them waits until what is written was taken; by then its request is aborted.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        timeout_ms = min(int(timeout_s * 1000) + 1, 2**31 - 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


@contextmanager
def _bound_socket(host: str, port: int) -> Generator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. Without it each small write waits 40 ms for the client's ACK.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            bound.bind((host, port))
            bound.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"router.port: cannot listen on {host}:{port}: {error.strerror}; "
                "stop what uses it, or give another port"
            ) from error
        yield bound
