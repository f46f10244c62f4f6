"""Two prefill and two decode workers in a network of their own, and a victim among their requests.

Links between workers are slow, so that a read of the victim takes seconds and can be met at a
point of its way. Its trace tells who serves it and how far it is.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.chaos.network import Network
from tests.integration.models import VOCAB_SIZE
from tests.integration.requests import generate_reference, prompt_of
from tests.integration.stack import Stack

LEASE_S, READ_TIMEOUT_S, WORKER_SILENCE_S = 4.0, 5.0, 6.0
CHANNEL_SILENCE_S = 5.0
"""Of ``core.channel``: after it a peer that says nothing is gone."""
BOUND_S = max(LEASE_S, READ_TIMEOUT_S, CHANNEL_SILENCE_S) + 50.0
"""Until blocks are back after a fault; the latter part is for a machine with other work."""
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
RATE = "10mbit"
VICTIM_TOKENS, BYSTANDER_TOKENS = 1400, 150
OUTPUT_TOKENS = 24
_numbers = itertools.count()


def salt() -> str:
    """Return a cache salt that nobody had before, so that no prefix is found."""
    return f"salt-{next(_numbers)}"


@dataclass
class Texts:
    """Prompts, and what a model says to each."""

    victims: list[list[int]]
    bystanders: list[list[int]]
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model_path: Path) -> "Texts":
        victims = [prompt_of(VICTIM_TOKENS, VOCAB_SIZE, seed=n) for n in range(2)]
        bystanders = [prompt_of(BYSTANDER_TOKENS, VOCAB_SIZE, seed=n) for n in range(4)]
        prompts = [*victims, *bystanders]
        said = generate_reference(model_path, prompts, num_tokens=OUTPUT_TOKENS)
        answers = {tuple(p): tokens for p, tokens in zip(prompts, said, strict=True)}
        return cls(victims, bystanders, answers)


@dataclass
class Fleet:
    """Use as ``with Fleet.open(...)``."""

    stack: Stack
    network: Network
    texts: Texts
    pool: ThreadPoolExecutor
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    """Blocks of each pool, as the first look at it found them."""

    @classmethod
    @contextmanager
    def open(cls, model_path: Path, texts: Texts) -> Iterator["Fleet"]:
        with (
            Network.open([*WORKERS], rate=RATE) as network,
            Stack.open(
                model_path,
                network=network,
                model={"dtype": "float32"},
                cache={"memory_gib": 0.05, "poison": True},
                decode={"cache": {"num_blocks": 160}},
                transfer={
                    "lease_s": LEASE_S,
                    "renew_interval_s": 1.0,
                    "read_timeout_s": READ_TIMEOUT_S,
                    "max_inflight_mib": 1,
                },
                scheduler={"max_batch_tokens": 256},
                router={"admission_wait_s": 8.0, "worker_silence_s": WORKER_SILENCE_S},
                deploy={"prefill": 2, "decode": 2},
                trace_requests=8192,  # all bystanders, however long the machine takes
                log_level="warning",
            ) as stack,
            ThreadPoolExecutor(8) as pool,
        ):
            yield cls(stack, network, texts, pool)

    def ask(
        self, prompt: list[int], *, name: str = "", num_tokens: int = OUTPUT_TOKENS
    ) -> httpx.Response:
        """Return the answer to ``prompt``."""
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt(),
        }
        headers = {"x-request-id": name} if name else {}
        url = f"{self.stack.url}/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=90)

    def is_right(self, prompt: list[int], response: httpx.Response) -> bool:
        """Whether ``response`` says what the model says to ``prompt``."""
        if response.status_code != 200:
            return False
        return response.json()["choices"][0]["token_ids"] == self.texts.answers[tuple(prompt)]

    def trace(self, name: str) -> dict[str, list[dict[str, Any]]]:
        """Return what each process that was reached recorded of a request."""
        response = httpx.get(f"{self.stack.url}/v1/trace/{name}", timeout=30)
        if response.status_code != 200:
            return {}
        return {process["name"]: process["events"] for process in response.json()["processes"]}

    def port_of(self, worker: str) -> int:
        """Return where ``worker`` listens for requests."""
        port = urlsplit(self.stack.worker(worker)["address"]).port
        assert port is not None
        return port

    def lives(self) -> dict[str, str]:
        """Return each worker's incarnation."""
        return {name: self.stack.worker(name)["incarnation"] for name in WORKERS}

    def wait_home(self) -> None:
        """Every worker is there, and has all its blocks, within the bound."""
        self.stack.wait_ready()
        self.wait_idle(WORKERS)

    def wait_idle(self, workers: Iterable[str]) -> None:
        """Every block of ``workers`` is FREE or CACHED within the bound, and none is missing."""
        for worker in workers:
            baseline = self.stack.wait_idle(worker, timeout_s=BOUND_S)
            size = self.sizes.setdefault(worker, sum(baseline.values()))
            assert sum(baseline.values()) == size, (worker, baseline)

    def wait_pair(self, prefill: str, decode: str) -> None:
        """``decode`` reads from ``prefill`` for some request, within the bound."""
        deadline = time.monotonic() + BOUND_S
        prompts = self.texts.bystanders
        while True:
            names = [salt() for _ in prompts]
            asked = [
                self.pool.submit(self.ask, p, name=n) for p, n in zip(prompts, names, strict=True)
            ]
            for prompt, future in zip(prompts, asked, strict=True):
                assert self.is_right(prompt, future.result()), future.result().text
            if any(self._has_read(name, prefill, decode) for name in names):
                return
            assert time.monotonic() < deadline, f"{decode} does not read from {prefill} any more"

    def _has_read(self, name: str, prefill: str, decode: str) -> bool:
        events = self.trace(name).get(decode, [])
        asked = any(e["values"].get("peer") == prefill for e in events)
        return asked and any(e["event"] == "delivered" for e in events)


class Victim:
    """One long request: who serves it, and where it is on its way."""

    def __init__(self, fleet: Fleet, prompt: list[int]) -> None:
        self._fleet = fleet
        self.prompt = prompt
        self.name = salt()
        self.answer: Future[httpx.Response] = fleet.pool.submit(fleet.ask, prompt, name=self.name)
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.prefill = self.decode = ""

    def wait(self, point: "Callable[[Victim], bool]", *, timeout_s: float = 60.0) -> bool:
        """Return as soon as it is at ``point``; False: it has its answer, and was not seen there.

        A machine with other work may look too seldom, or compute more slowly than the link sends.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            is_over = self.answer.done()
            self.events = self._fleet.trace(self.name)
            for event in self.events.get("router", []):
                if event["event"] == "dispatched":
                    assert event["attempt"] == 1, "it was struck before its time"
                    self.prefill, self.decode = (
                        event["values"].get("prefill", ""),
                        event["values"]["decode"],
                    )
            if self.prefill and point(self):
                return True
            if is_over:
                return False
            assert time.monotonic() < deadline, f"never there: {self.events}"

    def count(self, event: str) -> int:
        """Return how many of ``event`` the two workers have recorded."""
        events = self.events.get(self.decode, []) + self.events.get(self.prefill, [])
        return sum(entry["event"] == event for entry in events)

    def has_all_tickets(self) -> bool:
        events = self.events.get(self.decode, [])
        offered = [e["values"] for e in events if e["event"] == "ticket" and e["values"]["last"]]
        return any(ticket["last_layer"] == 3 for ticket in offered)


class Bystanders:
    """Short requests, two at any time, over every pair, as long as the block lasts."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._stop = threading.Event()
        self._tasks: list[Future[None]] = []
        self.answers: list[tuple[str, list[int], httpx.Response]] = []

    def __enter__(self) -> "Bystanders":
        self._stop.clear()
        self._tasks = [self._fleet.pool.submit(self._run, n) for n in range(2)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for task in self._tasks:
            task.result()

    def _run(self, number: int) -> None:
        prompts = self._fleet.texts.bystanders
        for turn in itertools.count(number):
            prompt, name = prompts[turn % len(prompts)], salt()
            self.answers.append((name, prompt, self._fleet.ask(prompt, name=name)))
            if self._stop.is_set():
                return
