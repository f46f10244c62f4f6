"""Prefill on one host, decode on another, and one cable between them that is cut and healed.

The failures guarded against: KV that takes another way than the cable, or arrives damaged; a cut
that makes a request hang, answer with wrong tokens or end without a clear error; blocks that wait
for a reader who will not come; a host that Ray has given up and that goes on with what it runs; and
a healed cable that serves nobody.
"""

import itertools
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from deploy.api_client import ApiClient, UnreachableError, WorkerStatus
from tests.chaos.network import why_not
from tests.deploy.load import Load
from tests.deploy.ray_cluster import kill, wait_until
from tests.deploy.ray_hosts import RayHosts
from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import complete_all, generate_reference, prompt_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.ucx,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

HEAD, OTHER = "head", "other"
"""Prefill and the router are on the first, decode on the second."""
NUM_TOKENS = 96
KV_NBYTES_PER_TOKEN = 4 * 2 * 2 * 16 * 4
"""Layers, key and value, heads, their size, and that of a number."""
PROMPT_LENGTHS = (40, 90, 150, 210)
START_TIMEOUT_S = 180.0
LEASE_S = 4.0
WORKER_SILENCE_S = 4.0
SHORT_CUT_S = 1.5
"""With TCP's next try, which may come as late again, still less than a worker may be silent."""
ADMISSION_WAIT_S = 16.0
"""Twice what it takes until all have given each other up; Ray has not by then."""
CUT_AFTER_S, LONG_ANSWER = 0.3, 1700
"""The longest of such a model: no machine is to be at its end by then."""
NO_DECODE = "no decode worker became ready in 16.0 s; try again later"
NUM_STARTS = 4
"""Of the controller; Ray places most of them rightly even where nobody says where."""
_salts = itertools.count(10**6)
Answers = tuple[list[list[int]], list[list[int]]]


class Served:
    """A deployment on the two hosts, as its clients and Prometheus see it."""

    def __init__(self, hosts: RayHosts, folder: Path, model_path: Path) -> None:
        self.hosts = hosts
        self._file = folder / "config.yaml"
        port = hosts.free_port(hosts.host(HEAD))
        self.client = ApiClient(f"http://{hosts.host(HEAD)}:{port}", timeout_s=30)
        sections: dict[str, dict[str, Any]] = {
            "model": {"model": str(model_path), "served_name": "model", "dtype": "float32"},
            "engine": {"num_threads": 1},
            "cache": {"num_blocks": 512},
            "transfer": {"lease_s": LEASE_S, "renew_interval_s": 1.0},
            "router": {
                "host": hosts.host(HEAD),
                "port": port,
                "worker_silence_s": WORKER_SILENCE_S,
                "admission_wait_s": ADMISSION_WAIT_S,
                "local_prefill_max_tokens": 32,
            },
            "deploy": {"prefill_resources": {HEAD: 1}, "decode_resources": {OTHER: 1}},
        }
        self._file.write_text(yaml.safe_dump(sections))
        command = ("python", "-m", "deploy.main", "serve", "--config", str(self._file))
        hosts.submit("two-hosts", *command)
        self.wait_complete()

    def workers(self) -> dict[str, WorkerStatus]:
        """Return the workers that serve, by role."""
        try:
            found = self.client.workers()
        except UnreachableError:
            return {}
        return {worker.role: worker for worker in found if worker.state == "ready"}

    def wait_complete(self) -> None:
        """Return when a worker of each role serves."""

        def is_so() -> bool:
            return set(self.workers()) == {"prefill", "decode"} and self.client.is_ready()

        try:
            wait_until(is_so, "both workers ready", timeout_s=START_TIMEOUT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.hosts.job_logs('two-hosts')}") from None

    def next_controller(self, killed: int) -> int:
        """Return the process of the controller, wherever it is, once it is not ``killed``."""

        def find() -> int | None:
            found = self.hosts.actors_on(HEAD) | self.hosts.actors_on(OTHER)
            return found.get("controller")

        wait_until(lambda: find() not in {None, killed}, "a controller")
        return find() or killed

    def metrics(self, role: str) -> dict[str, float]:
        """Return what the worker of ``role`` exports, by name and labels, once it serves."""
        read: list[str] = []

        def is_read() -> bool:
            if (worker := self.workers().get(role)) is not None:
                address = worker.metrics_address
                with (
                    suppress(OSError),
                    urllib.request.urlopen(address, timeout=20) as response,  # noqa: S310 - ours
                ):
                    read.append(response.read().decode())
            return bool(read)

        wait_until(is_read, f"metrics of {role}")
        (text,) = read
        samples = re.findall(r"^(sluice_\S+?(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
        return {sample: float(value) for sample, value in samples}

    def lives(self) -> dict[str, str]:
        """Return the incarnations of the workers that serve, by role."""
        return {role: worker.incarnation for role, worker in self.workers().items()}

    def wait_for_lives(self, lives: dict[str, str]) -> None:
        """Return when those serve: one that is late just now seems not to."""
        wait_until(lambda: self.lives() == lives, "the same workers")

    def nbytes_read(self) -> int:
        """Return how many bytes of KV have come to decode."""
        (nbytes,) = self._matching(r"sluice_kv_transfer_bytes_total\{.*\}").values()
        return int(nbytes)

    def paths(self) -> dict[str, int]:
        """Return how many prefill workers decode reads from, by path."""
        found = self._matching(r"sluice_kv_path_peers\{.*path=\"(\w+)\".*\}")
        return {path: int(number) for path, number in found.items() if number}

    def held(self, role: str) -> dict[str, float]:
        """Return the blocks of a worker that are neither free nor cached, by state."""
        found = self._matching(r"sluice_kv_blocks\{.*state=\"(\w+)\".*\}", role)
        return {s: int(n) for s, n in found.items() if n and s not in {"free", "cached"}}

    def _matching(self, pattern: str, role: str = "decode") -> dict[str, float]:
        """Return samples by the pattern's group, or by all of it."""
        return {
            (match[1] if match.re.groups else match[0]): number
            for sample, number in self.metrics(role).items()
            if (match := re.fullmatch(pattern, sample)) is not None
        }

    def wait_for_blocks(self, *roles: str) -> None:
        """Return when all blocks of the workers of ``roles`` have come back."""
        for role in roles:
            wait_until(lambda r=role: not self.held(r), f"blocks of {role} back")

    def outcome(self, prompt: list[int], num_tokens: int, *, streamed: bool) -> list[int] | str:
        """Return the tokens that a client gets, or the one error that it is told."""
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": f"salt-{next(_salts)}",
            "stream": streamed,
        }
        answer = httpx.post(f"{self.client.url}/v1/completions", json=body, timeout=90)
        lines = re.findall(r"^data: (\{.*)$", answer.text, re.MULTILINE)
        parts = [json.loads(line) for line in lines] or [answer.json()]
        for part in parts:
            if "error" in part:
                return str(part["error"]["message"])
        return [token for part in parts for token in part["choices"][0]["token_ids"]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def answers(model_path: Path) -> Answers:
    """Return prompts and what a model alone answers them."""
    prompts = [prompt_of(length, VOCAB_SIZE, seed=5) for length in PROMPT_LENGTHS]
    return prompts, generate_reference(model_path, prompts, num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def hosts() -> Iterator[RayHosts]:
    if (reason := why_not()) is not None:
        pytest.skip(f"no network namespaces with shaped links: {reason}")
    with RayHosts.of(HEAD, OTHER) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def served(
    hosts: RayHosts, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    yield Served(hosts, tmp_path_factory.mktemp("job"), model_path)
    hosts.stop("two-hosts")


@pytest.fixture
def at_rest(served: Served) -> Iterator[Served]:
    """Have both workers serve, and see that they hold no block afterwards."""
    served.wait_complete()
    yield served
    served.wait_complete()
    served.wait_for_blocks("prefill", "decode")


async def test_kv_crosses_the_cable_and_the_text_is_that_of_one_process(
    at_rest: Served, answers: Answers
) -> None:
    prompts, expected = answers
    nbytes_before, carried_before = at_rest.nbytes_read(), at_rest.hosts.network.nbytes_to(OTHER)
    told = await complete_all(
        at_rest.client.url,
        prompts,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        return_token_ids=True,
    )
    assert [answer["choices"][0]["token_ids"] for answer in told] == expected
    nbytes = sum(answer["sluice"]["kv_nbytes"] for answer in told)
    assert nbytes >= sum(PROMPT_LENGTHS) * KV_NBYTES_PER_TOKEN
    assert at_rest.nbytes_read() - nbytes_before == nbytes
    assert at_rest.hosts.network.nbytes_to(OTHER) - carried_before > nbytes
    assert at_rest.paths() == {"tcp": 1}


def test_supervision_is_beside_the_router_however_often_it_starts(at_rest: Served) -> None:
    """Cut off from it, a controller would take every worker on the other hosts for dead."""
    killed = 0
    for _ in range(NUM_STARTS):
        controller = at_rest.next_controller(killed)
        assert set(at_rest.hosts.actors_on(OTHER)) == {"decode-0"}
        kill(psutil.Process(controller))
        killed = controller
    at_rest.next_controller(killed)


def test_a_short_cut_is_a_pause(at_rest: Served, answers: Answers) -> None:
    lives = at_rest.lives()
    with Load(at_rest.client.url, *answers, are_new=True) as load:
        at_rest.hosts.network.cut(OTHER)
        time.sleep(SHORT_CUT_S)
        at_rest.hosts.network.heal(OTHER)
        load.wait_for_more(8)
    at_rest.wait_for_lives(lives)


def test_requests_outwait_a_cut_that_ends_before_they_may_fail(
    at_rest: Served, answers: Answers
) -> None:
    lives = at_rest.lives()
    with Load(at_rest.client.url, *answers, are_new=True) as load:
        at_rest.hosts.network.cut(OTHER)
        wait_until(lambda: "decode" not in at_rest.workers(), "decode is missed")
        at_rest.wait_for_blocks("prefill")
        at_rest.hosts.network.heal(OTHER)
        load.wait_for_more(8)
    at_rest.wait_for_lives(lives)


def test_a_host_that_stays_away_is_replaced_by_the_one_that_comes_back(
    at_rest: Served, answers: Answers
) -> None:
    prompts, expected = answers
    hosts, lives = at_rest.hosts, at_rest.lives()
    # Given requests that run on it, streamed and not
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [
            pool.submit(at_rest.outcome, prompt, LONG_ANSWER, streamed=number % 2 == 0)
            for number, prompt in enumerate(prompts)
        ]
        time.sleep(CUT_AFTER_S)
        # When the cable is cut, and not mended
        hosts.network.cut(OTHER)
        outcomes = [future.result() for future in asked]
    # Then each has an answer, right or an error that says why, and prefill has its blocks again
    for outcome, tokens in zip(outcomes, expected, strict=True):
        assert outcome[: len(tokens)] == tokens or outcome == NO_DECODE
    assert NO_DECODE in outcomes, "the cut came too late"
    at_rest.wait_for_blocks("prefill")
    # And what Ray has given up ends when it hears of it
    wait_until(lambda: hosts.num_nodes() == 1, "Ray misses the host")
    hosts.network.heal(OTHER)
    wait_until(lambda: hosts.network.processes_of(OTHER) == [], "nothing runs on the host")
    # And when Ray starts there again, a new worker serves with the prefill worker that there was
    hosts.lose(hosts.host(OTHER))
    hosts.start(OTHER)
    at_rest.wait_complete()
    with Load(at_rest.client.url, *answers, are_new=True) as load:
        load.wait_for_more()
    assert at_rest.paths() == {"tcp": 1}
    at_rest.wait_complete()
    after = at_rest.lives()
    assert after["prefill"] == lives["prefill"]
    assert after["decode"] != lives["decode"]
