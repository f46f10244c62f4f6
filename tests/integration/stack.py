# ruff: noqa: PLC0415, S310 - each role loads its own packages only; all URLs are ours
"""A whole deployment in processes of its own, without Ray: real sockets, real UCX, a real model.

Ray's part (placement, restart) has its own tests; here a test can kill, freeze and replace any
process at the moment it chooses.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from core import router_links
from core.channel import DeploymentKeys
from core.config import SluiceConfig
from core.ids import WorkerId
from core.lifecycle import Lifecycle
from core.logs import set_up_logging
from core.messages import DesiredWorkers, Party
from core.worker_context import WorkerContext
from deploy.cluster.ports import claim_port, held
from tests.chaos.network import Network, Place, enter, over_tcp
from tests.fork_server import forked_process

HOST = "127.0.0.1"
SECOND_HOST = "127.0.0.2"
START_TIMEOUT_S = 200.0
ANSWER_TIMEOUT_S = 60.0
"""Of a process that lives: it may have to wait for a processor."""
WORKER_SILENCE_S = 20.0


@dataclass(frozen=True)
class Member:
    """One process of a stack: pickled into it, so that it can be started again as it was."""

    role: Party
    name: str
    model_path: Path
    config: SluiceConfig
    keys: DeploymentKeys
    router_host: str
    control_port: int
    place: Place
    environment: Mapping[str, str]
    all_routers: tuple[str, ...] = ()
    """Addresses of the routers' common name; (): its router has one."""


def run_member(member: Member) -> None:
    """Run in the member's own process."""
    if member.place.namespace is not None:
        enter(member.place.namespace)
    from engine.threads import thread_environment

    os.environ.update(member.environment)
    os.environ.update(thread_environment(member.config.engine.num_threads))
    set_up_logging(
        member.config.log_level,
        worker=member.name,
        role=member.role,
        log_format=member.config.log_format,
    )
    asyncio.run(serve(member))


async def serve(member: Member) -> None:
    lifecycle = Lifecycle()
    deploy = member.config.deploy
    lifecycle.hear(DesiredWorkers(0, deploy.prefill, deploy.decode))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lifecycle.stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lifecycle.drain.set)
    if member.role == "router":
        from router.server import RouterContext, run_router

        await run_router(
            RouterContext(
                config=member.config,
                model_path=member.model_path,
                served_name="model",
                keys=member.keys.of("router"),
                host=member.router_host,
                control_port=member.control_port,
            ),
            lifecycle,
        )
        return
    if member.all_routers:
        router_links.addresses_of = _name_server(member)
    context = WorkerContext(
        worker_id=WorkerId(member.name),
        config=member.config.for_role("prefill" if member.role == "prefill" else "decode"),
        model_path=member.model_path,
        served_name="model",
        router_address=f"tcp://{member.router_host}:{member.control_port}",
        keys=member.keys.of(member.role),
        host=member.place.host,
    )
    if member.role == "prefill":
        from prefill.worker import run_prefill

        await run_prefill(context, lifecycle)
    else:
        from decode.worker import run_decode

        await run_decode(context, lifecycle)


def _name_server(member: Member) -> router_links.LookUp:
    """Return what answers as the cluster's name server does for a service with replicas."""

    async def look_up(_host: str, port: int) -> frozenset[str]:
        return frozenset(f"tcp://{host}:{port}" for host in member.all_routers)

    return look_up


class Stack:
    """Use as ``with Stack.open(...)``: nothing survives the block."""

    def __init__(
        self,
        model_path: Path,
        config: SluiceConfig,
        network: Network | None = None,
        *,
        second_router: bool = False,
        own_interpreters: bool = False,
    ) -> None:
        self._own_interpreters = own_interpreters
        host = HOST if network is None else network.gateway.host
        hosts = (host, SECOND_HOST) if second_router else (host,)
        self._ports = ExitStack()
        port = self._keep_port(*hosts)
        self.config = config.model_copy(
            update={"router": config.router.model_copy(update={"host": host, "port": port})}
        )
        self.url = f"http://{host}:{port}"
        self.processes: dict[str, BaseProcess] = {}
        self._lives: dict[str, str] = {}
        self._dead: set[str] = set()  # incarnations that the router may not have missed yet
        self.keys = keys = DeploymentKeys.generate()
        control_port = self._keep_port(*hosts)
        names: list[tuple[Party, str]] = [
            ("router", "router"),
            *(("prefill", f"prefill-{index}") for index in range(config.deploy.prefill)),
            *(("decode", f"decode-{index}") for index in range(config.deploy.decode)),
        ]
        self._members = {
            name: Member(
                role, name, model_path, self.config, keys, host, control_port, Place(host), {}
            )
            for role, name in names
        }
        self.second_url = ""
        if second_router:
            self._add_router(port)
        if network is not None:
            for name, place in network.places.items():
                member = self._members[name]
                self._members[name] = replace(member, place=place, environment=over_tcp())

    def _keep_port(self, *hosts: str) -> int:
        """Return a port that nobody else gets while who listens there starts, or restarts."""
        port = claim_port(hosts[0], 0, field="test")
        for host in hosts:
            self._ports.enter_context(held(host, port))
        return port

    def _add_router(self, port: int) -> None:
        first = self._members["router"]
        router = first.config.router.model_copy(update={"host": SECOND_HOST})
        self._members = {
            name: replace(member, all_routers=(first.router_host, SECOND_HOST))
            for name, member in self._members.items()
        }
        self._members["router-1"] = replace(
            first,
            name="router-1",
            config=first.config.model_copy(update={"router": router}),
            router_host=SECOND_HOST,
        )
        self.second_url = f"http://{SECOND_HOST}:{port}"

    @classmethod
    @contextmanager
    def open(
        cls,
        model_path: Path,
        *,
        network: Network | None = None,
        second_router: bool = False,
        own_interpreters: bool = False,
        **sections: Any,
    ) -> Iterator["Stack"]:
        """Start a stack with config ``sections`` and stop it completely at the end.

        With a ``network`` its workers run at the places of their names, and the router, which has
        none there, at the switch. A ``second_router`` has the first one's ports on another address.
        With ``own_interpreters`` nothing is forked: it starts as in production, and much slower.
        """
        # A worker that has to wait for a processor is not to be taken for a silent one.
        router = {"worker_silence_s": WORKER_SILENCE_S} | sections.pop("router", {})
        sections = {"engine": {"num_threads": 1}, "router": router} | sections
        stack = cls(
            model_path,
            SluiceConfig.parse(sections, source="test"),
            network,
            second_router=second_router,
            own_interpreters=own_interpreters,
        )
        try:
            for name in stack._members:
                stack.start(name)
            stack.wait_ready()
            yield stack
        finally:
            stack.stop()

    def start(self, name: str) -> None:
        """Start (again) the process ``name``."""
        member = self._members[name]
        if self._own_interpreters:
            process = get_context("spawn").Process(target=run_member, args=(member,), name=name)
        else:
            process = forked_process(run_member, (member,), name=name)
        process.start()
        self.processes[name] = process

    def kill(self, name: str, *, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to ``name``; after SIGKILL it is gone on return."""
        process = self.processes[name]
        assert process.pid is not None
        os.kill(process.pid, signal_number)
        if signal_number == signal.SIGKILL:
            if name in self._lives:
                self._dead.add(self._lives[name])
            process.join(ANSWER_TIMEOUT_S)

    def stop(self) -> None:
        """End every process, by force after some seconds."""
        for process in self.processes.values():
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGCONT)
                process.terminate()
        deadline = time.monotonic() + 10
        for process in self.processes.values():
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._ports.close()

    def wait_ready(self, *, num_workers: int | None = None) -> None:
        """Return when the router is ready and knows all workers."""
        wanted = (
            sum(m.role != "router" for m in self._members.values())
            if num_workers is None
            else num_workers
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            dead = [n for n, p in self.processes.items() if p.exitcode not in (None, 0, -9)]
            assert not dead, f"{dead} ended while starting"
            alive = self._alive()
            if self.get("/ready")[0] == 200 and len(alive) >= wanted:
                self._lives |= {worker["worker_id"]: worker["incarnation"] for worker in alive}
                return
            assert time.monotonic() < deadline, f"not ready: {self.get('/ready')}"
            time.sleep(0.1)

    def workers(self) -> list[dict[str, Any]]:
        """Return the workers that the router would use now."""
        status, body = self.get("/status")
        workers = json.loads(body)["workers"] if status == 200 else []
        return [worker for worker in workers if worker["state"] == "ready"]

    def _alive(self) -> list[dict[str, Any]]:
        return [w for w in self.workers() if w["incarnation"] not in self._dead]

    def worker(self, name: str) -> dict[str, Any]:
        """Return what the router says of one worker that lives, once it knows it."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            for worker in self._alive():
                if worker["worker_id"] == name:
                    return worker
            assert time.monotonic() < deadline, f"{name} does not report: {self.get('/status')}"
            time.sleep(0.05)

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body; 0 where nothing answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=ANSWER_TIMEOUT_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metrics(self, name: str) -> dict[str, float]:
        """Return the samples of one worker by name with labels, as in the exposition."""
        address = self.worker(name)["metrics_address"]
        with urllib.request.urlopen(address, timeout=ANSWER_TIMEOUT_S) as response:
            text = response.read().decode()
        samples = re.findall(r"^(sluice_\S+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
        return {sample: float(value) for sample, value in samples}

    def blocks(self, name: str) -> dict[str, int]:
        """Return one worker's blocks by state."""
        pattern = re.compile(r"sluice_kv_blocks\{.*state=\"(\w+)\".*\}")
        found = {}
        for sample, value in self.metrics(name).items():
            if (match := pattern.fullmatch(sample)) is not None:
                found[match[1]] = int(value)
        return found

    def wait_idle(self, name: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, int]:
        """Return the blocks once all are FREE or CACHED; fail with the states otherwise."""
        deadline = time.monotonic() + timeout_s
        while True:
            blocks = self.blocks(name)
            if sum(blocks.values()) == blocks["free"] + blocks["cached"]:
                return blocks
            assert time.monotonic() < deadline, f"{name} still holds blocks: {blocks}"
            with contextlib.suppress(InterruptedError):
                time.sleep(0.1)
