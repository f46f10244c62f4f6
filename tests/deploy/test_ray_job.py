"""A deployment on a real Ray cluster of three nodes, submitted as a job, changed while it serves.

The failures guarded against: a request that is lost because a worker comes, goes, moves or is
replaced; an update by which no worker can start, of which nobody learns; a controller or a node
whose loss is not made up for; blocks that nobody gives back; and a job that leaves actors,
processes, ports or shared memory on a cluster that others use.
"""

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import yaml

from deploy.api_client import ApiClient, UnreachableError, WorkerStatus
from deploy.cluster.ports import claim_port
from deploy.commands.status import progress
from tests.deploy.load import Load
from tests.deploy.ray_cluster import HEAD, LOOPBACK, TIMEOUT_S, RayCluster, kill, wait_until
from tests.free_ports import free_port
from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import generate_reference, prompt_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.ucx,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

NODES = ("127.0.0.3", "127.0.0.4")
CPUS_OF_A_NODE = 6
NUM_TOKENS = 96
MORE_BLOCKS_THAN_FIT = 2**31 - 1
"""On any machine, by one layer of the smallest model."""
PROMPT_LENGTHS = (20, 90, 150, 210)
MAX_UPLOAD_NBYTES = 16 * 1024 * 1024
Answers = tuple[list[list[int]], list[list[int]]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def answers(model_path: Path) -> Answers:
    """Return prompts and what a model alone answers them."""
    prompts = [prompt_of(length, VOCAB_SIZE, seed=3) for length in PROMPT_LENGTHS]
    return prompts, generate_reference(model_path, prompts, num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster.open(dict.fromkeys(NODES, CPUS_OF_A_NODE)) as cluster:
        yield cluster


class Job:
    """One deployment as a job."""

    def __init__(self, cluster: RayCluster, name: str, folder: Path, model_path: Path) -> None:
        self.cluster, self.name = cluster, name
        self.file = folder / f"{name}.yaml"
        self.port = free_port()
        self.control_port = free_port(HEAD)
        self._sections: dict[str, dict[str, Any]] = {
            "model": {
                "model": str(model_path),
                "served_name": "model",
                "dtype": "float32",
                "device": "cpu",
            },
            "engine": {"num_threads": 1},
            "cache": {"num_blocks": 256},
            "router": {
                "port": self.port,
                "control_port": self.control_port,
                "local_prefill_max_tokens": 32,
            },
            "deploy": {"name": name, "prefill": 1, "decode": 2, "placement": "spread"},
        }
        self.write()
        self.client = ApiClient(f"http://{LOOPBACK}:{self.port}", timeout_s=60)

    def write(self, **cache: int) -> Path:
        """Write the config file, with other fields of ``cache``."""
        self._sections["cache"] |= cache
        self.file.write_text(yaml.safe_dump(self._sections))
        return self.file

    def submit(self) -> None:
        """Submit it and wait until it serves."""
        command = ("python", "-m", "deploy.main", "serve")
        self.cluster.submit(self.name, *command, "--config", str(self.file))
        self.wait_for(prefill=1, decode=2)

    def ready(self) -> list[WorkerStatus]:
        """Return the workers that serve."""
        try:
            workers = self.client.workers()
        except UnreachableError:
            return []
        return [worker for worker in workers if worker.state == "ready"]

    def trouble(self) -> tuple[str, ...] | None:
        """Return who does not serve and why; None: the router does not answer just now."""
        try:
            return self.client.status().trouble
        except UnreachableError:
            return None

    def stays_down(self) -> list[str]:
        """Return what the router says of workers that were given up."""
        return [line for line in self.trouble() or () if " stays down: " in line]

    def counts(self) -> dict[str, int]:
        """Return how many of each role serve."""
        roles = [worker.role for worker in self.ready()]
        return {"prefill": roles.count("prefill"), "decode": roles.count("decode")}

    def wait_for(self, **counts: int) -> None:
        """Return when so many of each role serve, and no other."""

        def is_so() -> bool:
            try:
                return self.counts() == counts and self.client.is_ready()
            except UnreachableError:
                return False

        try:
            wait_until(is_so, f"{counts} ready")
        except AssertionError as error:
            logs = self.cluster.job_logs(self.name)
            raise AssertionError(f"{error}; there are {self.counts()}; {logs}") from None

    def wait_for_word_of(self, **counts: int) -> None:
        """Return when Prometheus would see that so many of each role are wanted."""
        pattern = r"^sluice_workers_desired\{role=\"(\w+)\"\} (\S+)$"
        address = f"http://{LOOPBACK}:{self.port}/metrics"

        def is_so() -> bool:
            with suppress(OSError):
                return samples(address, pattern) == counts
            return False

        wait_until(is_so, f"{counts} are wanted")

    def wait_for_lives(self, lives: set[str]) -> None:
        """Return when those serve, and no others: one that is late just now seems not to."""
        wait_until(lambda: {w.incarnation for w in self.ready()} == lives, "the same workers")

    def ask(self, command: str, *arguments: str) -> None:
        """Run ``sluice COMMAND`` for it."""
        at = (f"--name={self.name}", f"--address={self.cluster.address}")
        self.cluster.run("deploy.main", command, *arguments, *at)

    def wait_for_free_blocks(self) -> None:
        """Return when every block of every worker is free or cached."""

        def are_free() -> bool:
            with suppress(OSError):  # one has ended that the router still knows
                every = [blocks_of(worker) for worker in self.ready()]
                return all(sum(b.values()) == b["free"] + b["cached"] for b in every)
            return False

        wait_until(are_free, "all blocks free or cached")


def host_of(worker: WorkerStatus) -> str:
    """Return the address of a worker's node."""
    return str(urlsplit(worker.metrics_address).hostname)


def blocks_of(worker: WorkerStatus) -> dict[str, int]:
    """Return a worker's blocks by state, as Prometheus would see them."""
    return samples(worker.metrics_address, r"^sluice_kv_blocks\{.*state=\"(\w+)\".*\} (\S+)$")


def samples(address: str, pattern: str) -> dict[str, int]:
    """Return the samples that a scrape of ``address`` has, by the label that ``pattern`` takes."""
    with urllib.request.urlopen(address, timeout=60) as response:  # noqa: S310 - ours
        text = response.read().decode()
    return {label: int(float(n)) for label, n in re.findall(pattern, text, re.MULTILINE)}


@pytest.fixture(scope="module")
def job(
    cluster: RayCluster, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Job]:
    """Return a deployment of one prefill and two decode workers that serves."""
    job = Job(cluster, "changing", tmp_path_factory.mktemp("job"), model_path)
    job.submit()
    yield job
    cluster.stop(job.name)


@pytest.fixture
def at_rest(job: Job) -> Iterator[Job]:
    """Have the deployment as it was submitted, and see that it holds no block afterwards."""
    if job.counts() != {"prefill": 1, "decode": 2}:
        job.ask("scale", "prefill=1", "decode=2")
    job.wait_for(prefill=1, decode=2)
    yield job
    job.wait_for_free_blocks()


def test_a_submitted_job_uploads_little_and_uses_several_nodes(
    cluster: RayCluster, at_rest: Job, answers: Answers
) -> None:
    with Load(at_rest.client.url, *answers) as load:
        load.wait_for_more()
    assert {host_of(worker) for worker in at_rest.ready()} == set(NODES)
    assert all(0 < size < MAX_UPLOAD_NBYTES for size in cluster.uploads())
    assert cluster.uploads() != []


def test_workers_come_and_go_under_load(at_rest: Job, answers: Answers) -> None:
    with Load(at_rest.client.url, *answers) as load:
        at_rest.ask("scale", "prefill=2", "decode=3")
        at_rest.wait_for(prefill=2, decode=3)
        at_rest.wait_for_word_of(prefill=2, decode=3)
        load.wait_for_more(8)
        at_rest.ask("scale", "prefill=1", "decode=1")
        at_rest.wait_for(prefill=1, decode=1)
        load.wait_for_more(8)


def test_a_worker_changes_its_role_under_load(at_rest: Job, answers: Answers) -> None:
    name = max(worker.worker_id for worker in at_rest.ready() if worker.role == "decode")
    with Load(at_rest.client.url, *answers) as load:
        at_rest.ask("scale", f"--role={name}=prefill")
        at_rest.wait_for(prefill=2, decode=1)
        load.wait_for_more(8)


def test_a_killed_controller_goes_on_with_what_was_wanted(
    cluster: RayCluster, at_rest: Job, answers: Answers
) -> None:
    lives = {worker.incarnation for worker in at_rest.ready()}
    with Load(at_rest.client.url, *answers) as load:
        (controller,) = (p for p, title in cluster.ours().items() if "Controller" in title)
        kill(controller)

        def is_back() -> bool:
            found = [p for p, title in cluster.ours().items() if "Controller" in title]
            return found not in ([], [controller])

        wait_until(is_back, "another controller")
        load.wait_for_more(8)
        at_rest.wait_for_lives(lives)
        at_rest.ask("scale", "decode=3")
        at_rest.wait_for(prefill=1, decode=3)
        at_rest.wait_for_word_of(prefill=1, decode=3)


def test_an_update_replaces_every_worker_and_no_request_is_lost(
    at_rest: Job, answers: Answers
) -> None:
    old = {worker.incarnation for worker in at_rest.ready()}
    with Load(at_rest.client.url, *answers) as load:
        at_rest.ask("update", f"--config={at_rest.write(num_blocks=320)}")
        wait_until(
            lambda: not old & {worker.incarnation for worker in at_rest.ready()},
            "no worker of the old revision",
        )
        at_rest.wait_for(prefill=1, decode=2)
        load.wait_for_more(8)
    assert {sum(blocks_of(worker).values()) for worker in at_rest.ready()} == {320}


def test_an_update_that_no_worker_can_start_by_is_told_and_taken_back_and_costs_no_worker(
    at_rest: Job, answers: Answers
) -> None:
    before = {worker.incarnation for worker in at_rest.ready()}
    blocks = {sum(blocks_of(worker).values()) for worker in at_rest.ready()}
    with Load(at_rest.client.url, *answers) as load:
        at_rest.ask("update", f"--config={at_rest.write(num_blocks=MORE_BLOCKS_THAN_FIT)}")
        wait_until(lambda: len(at_rest.stays_down()) == 2, "one of each role is given up")
        for line in at_rest.stays_down():
            assert "its config cannot work: cache: a pool of " in line
        at_rest.wait_for_lives(before)
        at_rest.ask("update", "--undo")
        wait_until(lambda: at_rest.trouble() == (), "nothing is told any more")
        load.wait_for_more(8)
    at_rest.wait_for_lives(before)
    assert progress(at_rest.client.status()) is None
    at_rest.write(num_blocks=blocks.pop())


def test_a_lost_node_is_made_up_for_on_the_other_one(
    cluster: RayCluster, at_rest: Job, answers: Answers
) -> None:
    """Lost is the one that has fewer workers, without warning: only its raylet is killed."""
    workers = at_rest.ready()
    used = [host_of(worker) for worker in workers]
    victim = min(set(used), key=used.count)
    lost = {worker.incarnation for worker in workers if host_of(worker) == victim}
    on_it = cluster.processes_on(victim)
    with Load(at_rest.client.url, *answers) as load:
        cluster.kill_raylet(victim)
        assert psutil.wait_procs(on_it, timeout=TIMEOUT_S)[1] == []
        wait_until(lambda: cluster.num_nodes() == len(NODES), "Ray misses the node")
        wait_until(
            lambda: not lost & {worker.incarnation for worker in at_rest.ready()},
            "the router misses the lost workers",
        )
        at_rest.wait_for(prefill=1, decode=2)
        load.wait_for_more(8)
    cluster.lose(victim)
    cluster.add(victim, CPUS_OF_A_NODE)


def shared_memory_of(processes: list[psutil.Process]) -> set[Path]:
    """Return the segments in ``/dev/shm`` that ``processes`` have mapped, less Ray's own."""
    segments: set[Path] = set()
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        mapped = re.findall(r"/dev/shm/\S+", maps)  # noqa: S108 - looked for, not written to
        segments |= {Path(path) for path in mapped if "plasma" not in path}
    return segments


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_nothing_of_a_job_is_left(
    how: str, cluster: RayCluster, model_path: Path, answers: Answers, tmp_path: Path
) -> None:
    before = set(cluster.ours())
    actors_before = sorted(cluster.living_actors())
    job = Job(cluster, f"ending-by-{how}", tmp_path, model_path)
    job.submit()
    with Load(job.client.url, *answers) as load:
        load.wait_for_more()
    mine = {p: title for p, title in cluster.ours().items() if p not in before}
    actors = [p for p, title in mine.items() if title.startswith("ray::")]
    segments = shared_memory_of(actors)
    assert sum("Service" in title for title in mine.values()) == 4

    if how == "kill":
        drivers = [p for p, title in mine.items() if not title.startswith("ray::")]
        assert drivers
        for driver in drivers:
            os.kill(driver.pid, signal.SIGKILL)
    else:
        cluster.stop(job.name)

    _, alive = psutil.wait_procs(list(mine), timeout=TIMEOUT_S)
    assert {p: mine[p] for p in alive} == {}
    wait_until(lambda: sorted(cluster.living_actors()) == actors_before, "its actors dead")
    assert cluster.placement_groups() == []
    assert {segment for segment in segments if segment.exists()} == set()
    assert claim_port(LOOPBACK, job.port, field="test") == job.port
    assert claim_port(HEAD, job.control_port, field="test") == job.control_port
