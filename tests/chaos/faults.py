"""What may happen to a worker or to a link, and the points of a request's way at which it does."""

import json
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from tests.chaos.fleet import VICTIM_TOKENS, Fleet, Victim, salt
from tests.integration.models import VOCAB_SIZE
from tests.integration.requests import prompt_of

MAX_OTHERS, MAX_TRIES = 6, 8
PLACED_WITHIN_S, LEAVES_WITHIN_S = 3.0, 12.0
DECODE = ("decode-0", "decode-1")
Act = Callable[[Fleet, Victim], None]


@dataclass(frozen=True)
class Fault:
    """Strikes; what it did is mended once the victim has its answer."""

    name: str
    strike: Act
    mend: Act
    touches: Callable[[Victim, str, str], bool]
    """Whether it concerns a request of a prefill and a decode worker."""
    struck: Callable[[Victim], str | None]
    """The worker that nobody reaches meanwhile."""
    is_fatal: bool


def _of_worker(
    name: str, side: str, strike: Callable[..., None], mend: Callable[..., None]
) -> Fault:
    def struck(victim: Victim) -> str:
        return victim.prefill if side == "prefill" else victim.decode

    return Fault(
        f"{name}-{side}",
        lambda fleet, victim: strike(fleet, struck(victim)),
        lambda fleet, victim: mend(fleet, struck(victim)),
        lambda victim, prefill, decode: struck(victim) in (prefill, decode),
        struck,
        is_fatal=name == "kill",
    )


def _kill(fleet: Fleet, worker: str) -> None:
    fleet.stack.kill(worker)


def _start(fleet: Fleet, worker: str) -> None:
    fleet.stack.start(worker)


def _freeze(fleet: Fleet, worker: str) -> None:
    fleet.stack.kill(worker, signal_number=signal.SIGSTOP)


def _wake(fleet: Fleet, worker: str) -> None:
    fleet.stack.kill(worker, signal_number=signal.SIGCONT)


def _cut(fleet: Fleet, worker: str) -> None:
    fleet.network.cut(worker)


def _heal(fleet: Fleet, worker: str) -> None:
    fleet.network.heal(worker)


FAULTS = [
    *(
        _of_worker(name, side, strike, mend)
        for side in ("prefill", "decode")
        for name, strike, mend in (
            ("kill", _kill, _start),
            ("freeze", _freeze, _wake),
            ("cut", _cut, _heal),
        )
    ),
    Fault(
        "part-the-pair",
        lambda fleet, victim: fleet.network.part(victim.prefill, victim.decode),
        lambda fleet, victim: fleet.network.join(victim.prefill, victim.decode),
        lambda victim, prefill, decode: (prefill, decode) == (victim.prefill, victim.decode),
        lambda _: None,
        is_fatal=False,
    ),
]


@contextmanager
def ticketed(fleet: Fleet, prompt: list[int]) -> Iterator[Victim]:
    """All tickets are here, and decode has no memory: others decode there, and hold it."""
    for _ in range(MAX_TRIES):
        with ExitStack() as others:
            fill_decode(fleet, others)
            victim = Victim(fleet, prompt)
            is_there = victim.wait(lambda v: v.has_all_tickets() or v.count("read_posted") > 0)
            if is_there and victim.count("read_posted") == 0:
                yield victim
                return  # the others leave when the fault has struck
        victim.answer.result()  # one of them had ended too early
    raise AssertionError("decode always has room")


def fill_decode(fleet: Fleet, others: ExitStack) -> None:
    """Leave no room for the victim on any decode worker for a while, or until ``others`` closes.

    Each of the others takes its blocks before its KV comes, so that the slow link keeps them
    longer than any prefill takes, however fast the machine.
    """
    for _ in range(MAX_OTHERS):
        num_full = sum(has_no_room(fleet, worker) for worker in DECODE)
        if num_full == len(DECODE):
            return
        others.callback(leave, ask_only(fleet.stack.url, other_body()))
        deadline = time.monotonic() + PLACED_WITHIN_S
        while sum(has_no_room(fleet, worker) for worker in DECODE) <= num_full:
            if time.monotonic() > deadline:
                break  # it waits behind another


def ask_only(url: str, body: dict[str, Any]) -> HTTPConnection:
    """Send a request and read nothing."""
    connection = HTTPConnection(urlsplit(url).netloc)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", body=json.dumps(body), headers=headers)
    return connection


def leave(connection: HTTPConnection) -> None:
    """Cancel what was asked once its first token is there.

    Not before: to cancel reads that fill a pool ends the pair's connection, by which others are
    touched that the fault does not concern.
    """
    select.select([connection.sock], [], [], LEAVES_WITHIN_S)
    connection.close()


def other_body() -> dict[str, Any]:
    """Return a request that holds most of a decode worker's blocks for a while."""
    return {
        "model": "model",
        "prompt": prompt_of(VICTIM_TOKENS, VOCAB_SIZE, seed=77),
        "max_tokens": 600,
        "ignore_eos": True,
        "stream": True,
        "cache_salt": salt(),
    }


def has_no_room(fleet: Fleet, worker: str) -> bool:
    """Whether the victim does not fit into ``worker``."""
    blocks = fleet.stack.blocks(worker)
    return blocks["free"] + blocks["cached"] < VICTIM_TOKENS // 16


@contextmanager
def posted(fleet: Fleet, prompt: list[int]) -> Iterator[Victim]:
    """Reads are on their way."""
    yield victim_at(fleet, prompt, lambda v: v.count("read_posted") > v.count("read_landed"))


@contextmanager
def half_landed(fleet: Fleet, prompt: list[int]) -> Iterator[Victim]:
    """All tickets are here, some reads have landed, others are on their way."""
    yield victim_at(
        fleet,
        prompt,
        lambda v: v.has_all_tickets() and v.count("read_posted") > v.count("read_landed") > 0,
    )


def victim_at(fleet: Fleet, prompt: list[int], point: Callable[[Victim], bool]) -> Victim:
    """Return a victim that was seen at ``point``; those that were not have their answers."""
    for _ in range(MAX_TRIES):
        victim = Victim(fleet, prompt)
        if victim.wait(point):
            return victim
        victim.answer.result()
    raise AssertionError("never seen there")


@contextmanager
def landed_not_released(fleet: Fleet, prompt: list[int]) -> Iterator[Victim]:
    """All is here; what decode says to prefill gets lost, so that prefill does not know."""
    for _ in range(MAX_TRIES):
        # From the first ticket on: a busy machine may take longer to hold a link than a read takes
        victim = victim_at(
            fleet, prompt, lambda v: v.count("ticket") > 0 and not v.count("delivered")
        )
        port = fleet.port_of(victim.prefill)
        fleet.network.hold(victim.decode, victim.prefill, port=port, acks_pass=True)
        try:
            # Within a lease of its last word, or prefill knows by its clock
            is_there = victim.wait(lambda v: v.count("delivered") > 0 and not v.count("released"))
            if is_there and fleet.stack.blocks(victim.prefill)["leased"] > 0:
                yield victim
                return
        finally:
            fleet.network.release(victim.decode, victim.prefill)
        victim.answer.result()
    raise AssertionError("prefill always knows")


POINTS = [ticketed, posted, half_landed, landed_not_released]
