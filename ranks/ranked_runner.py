"""Steps of all ranks at once: the engine's executor sees one runner."""

import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from core.errors import InternalError
from core.ids import StepSeq
from engine.batch import StepBatch, StepOutput
from engine.executor import LaunchedStep, StepRunner
from ranks.frames import receive_frame, send_frame
from ranks.messages import StepDone


class StepFollower(Protocol):
    """One of the other ranks, as far as steps need it."""

    @property
    def rank(self) -> int:
        """Its number."""
        ...

    @property
    def steps(self) -> socket.socket:
        """Takes ``StepBatch`` and gives ``StepDone``; its timeout bounds both."""
        ...


class StepFollowers(Protocol):
    """All of them."""

    def __iter__(self) -> Iterator[StepFollower]:
        """In the order of their ranks."""
        ...

    def kill(self) -> None:
        """End them: on return none writes anything."""
        ...


class RankedStep:
    """A step that all ranks have been given; complete when *every* one of them has completed it."""

    def __init__(self, own: LaunchedStep, followers: Iterable[StepFollower]) -> None:
        self.step: StepSeq = own.step
        self._own = own
        self._followers = tuple(followers)

    def wait(self) -> StepOutput:
        """Return the leader's output once no rank writes for the step any more.

        Raises:
            InternalError: a rank failed, was lost, or did not answer.
        """
        output = self._own.wait()
        for follower in self._followers:
            done = _receive_done(follower)
            if done.step != self.step:
                raise InternalError(
                    f"rank {follower.rank} ended step {done.step} while {self.step} was awaited"
                )
            if done.failure is not None:
                raise InternalError(f"rank {follower.rank}: {done.failure}")
        return output


class RankedRunner:
    """The leader's runner and its followers'; see ``StepRunner``."""

    def __init__(self, own: StepRunner, followers: StepFollowers) -> None:
        self._own = own
        self._followers = followers

    @property
    def is_asynchronous(self) -> bool:
        """See ``StepRunner.is_asynchronous``: the same on all ranks."""
        return self._own.is_asynchronous

    def launch(self, batch: StepBatch, on_layers: Callable[[int], None]) -> RankedStep:
        """Give all ranks ``batch``.

        The leader alone reports layers, for all: behind a layer's attention its ranks add up their
        parts, so none is past that sum before every rank has written that layer's KV.

        Raises:
            InternalError: a rank was lost.
        """
        theirs = replace(batch, layer_marks=())
        for follower in self._followers:
            try:
                send_frame(follower.steps, theirs)
            except OSError as error:
                raise InternalError(f"rank {follower.rank} takes no step any more") from error
        return RankedStep(self._own.launch(batch, on_layers), self._followers)

    def drain(self) -> None:
        """End the followers, which proves that they write nothing, and drain the leader.

        Called after a failed step, behind which none is run.
        """
        self._followers.kill()
        self._own.drain()


def _receive_done(follower: StepFollower) -> StepDone:
    try:
        message = receive_frame(follower.steps)
    except OSError as error:
        raise InternalError(f"rank {follower.rank} did not end its part of a step") from error
    if not isinstance(message, StepDone):
        raise InternalError(f"rank {follower.rank} sent {message!r} for a step")
    return message
