"""The processes of a worker's other ranks, as the leader has them: started, watched, ended."""

import asyncio
import logging
import multiprocessing
import shutil
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from typing import TypeVar

import psutil
import torch

from core.errors import ConfigError, InternalError
from core.messages import PoolEndpoint
from engine.rank_group import COLLECTIVE_TIMEOUT_S, LEADER, RankGroup, RankPlace
from ranks.follower import run_follower
from ranks.frames import receive_frame, send_frame
from ranks.load_order import loads_at_once, model_nbytes
from ranks.messages import Load, Loaded, Meet, RankSpec, Started, StartFailed

log = logging.getLogger(__name__)

KILL_TIMEOUT_S = 5.0
_EXIT_CODE_TIMEOUT_S = 0.2
_LEAST_TIMEOUT_S = 0.001
Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class Follower:
    """One follower. ``steps`` belongs to the engine's threads, ``transfers`` to the event loop."""

    rank: int
    process: BaseProcess
    steps: socket.socket
    transfers: socket.socket


class _Deadline:
    """One for all followers: what one has used up is not there for the next."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return what a socket may block for: never 0, with which it would not block at all."""
        return max(_LEAST_TIMEOUT_S, self._at - time.monotonic())


class Followers:
    """All followers of one leader, which must ``kill`` them.

    The folder of ``spec.store`` is theirs to remove: early, where the collectives never look there
    again, so that a leader that is killed leaves nothing.
    """

    def __init__(self, spec: RankSpec) -> None:
        """Start them; they load their parts beside the leader's, or in turn if memory is short.

        Call it in a thread that lives as long as the process: followers die with it.
        """
        self._spec = spec
        self._followers = [
            _start(replace(spec, rank=rank)) for rank in range(spec.num_ranks) if rank != LEADER
        ]
        self._in_turn = not loads_at_once(
            model_nbytes(spec.model_path, dtype=spec.config.model.dtype),
            free_nbytes=psutil.virtual_memory().available,
            num_ranks=spec.num_ranks,
        )
        if not self._in_turn:
            for follower in self._followers:
                self._send(follower, Load())

    def __iter__(self) -> Iterator[Follower]:
        return iter(self._followers)

    @property
    def place(self) -> RankPlace:
        """The leader's own, for ``start_engine``."""
        return RankPlace(rank=LEADER, num_ranks=self._spec.num_ranks, join=self._join)

    def await_started(self) -> tuple[PoolEndpoint | None, ...]:
        """Return the followers' endpoints, by rank, once their engines are warm.

        Raises:
            InternalError: one was lost, or not all are warm within ``COLLECTIVE_TIMEOUT_S``.
        """
        deadline = _Deadline(COLLECTIVE_TIMEOUT_S)
        return tuple(
            self._receive(follower, Started, deadline).endpoint for follower in self._followers
        )

    async def watch(self) -> None:
        """Return never.

        Raises:
            InternalError: a follower has ended: this worker can compute nothing any more.
        """
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[Follower] = loop.create_future()

        def note(follower: Follower) -> None:
            loop.remove_reader(follower.process.sentinel)
            if not lost.done():
                lost.set_result(follower)

        for follower in self._followers:
            loop.add_reader(follower.process.sentinel, note, follower)
        try:
            raise _lost(await lost, "is gone")
        finally:
            for follower in self._followers:
                loop.remove_reader(follower.process.sentinel)

    def kill(self) -> None:
        """End all followers. On return nothing is written to their pools any more.

        A second call does nothing. Any thread may call.

        Raises:
            InternalError: the kernel did not end one in time.
        """
        for follower in self._followers:
            if follower.process.is_alive():
                follower.process.kill()
        for follower in self._followers:
            follower.process.join(KILL_TIMEOUT_S)
            if follower.process.is_alive():
                raise InternalError(f"rank {follower.rank} does not end after SIGKILL")
        self._remove_store()

    def _join(self, device: torch.device) -> RankGroup:
        deadline = _Deadline(self._spec.config.deploy.start_timeout_s)
        for follower in self._followers:
            if self._in_turn:
                self._send(follower, Load())
            self._receive(follower, Loaded, deadline)
        for follower in self._followers:
            self._send(follower, Meet())
        group = RankGroup.join(
            self._spec.store, rank=LEADER, size=self._spec.num_ranks, device=device
        )
        if device.type == "cpu":
            self._remove_store()  # NCCL's watchdog reads it as long as it runs
        return group

    def _remove_store(self) -> None:
        shutil.rmtree(self._spec.store.parent, ignore_errors=True)

    @staticmethod
    def _send(follower: Follower, message: Load | Meet) -> None:
        with _losing(follower, COLLECTIVE_TIMEOUT_S):
            send_frame(follower.steps, message)

    def _receive(self, follower: Follower, kind: type[Message], deadline: _Deadline) -> Message:
        with _losing(follower, deadline.timeout_s):
            follower.steps.settimeout(deadline.left_s())
            message = receive_frame(follower.steps)
            follower.steps.settimeout(COLLECTIVE_TIMEOUT_S)
        if isinstance(message, StartFailed):
            error = ConfigError if message.is_final else InternalError
            raise error(f"rank {follower.rank}: {message.reason}")
        if not isinstance(message, kind):
            raise InternalError(f"rank {follower.rank} sent {message!r} instead of {kind.__name__}")
        return message


@contextmanager
def _losing(follower: Follower, timeout_s: float) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise _lost(follower, f"has not answered within {timeout_s:g} s") from error


def _lost(follower: Follower, state: str) -> InternalError:
    follower.process.join(_EXIT_CODE_TIMEOUT_S)  # its pipes close a moment before it is gone
    code = follower.process.exitcode
    if code is not None:
        state = f"ended with exit code {code}"
    return InternalError(f"rank {follower.rank} of this worker {state}")


def _start(spec: RankSpec) -> Follower:
    (steps, their_steps), (transfers, their_transfers) = socket.socketpair(), socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(
        target=run_follower,
        args=(spec, their_steps, their_transfers),
        name=f"{spec.worker}-rank-{spec.rank}",
        daemon=True,
    )
    process.start()
    # Only the follower may hold its ends: what closes them is its death.
    their_steps.close()
    their_transfers.close()
    steps.settimeout(COLLECTIVE_TIMEOUT_S)
    return Follower(spec.rank, process, steps, transfers)
