"""A clock that jumps from event to event, and channels that keep the order of their messages."""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence

Event = Callable[[], None]


class Simulation:
    """Events at virtual times; equal times in order of their making."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()
        self._channel_free: dict[tuple[str, str], float] = {}

    def after(self, delay: float, event: Event) -> None:
        """Let ``event`` happen in ``delay`` seconds."""
        self._at(self.now + delay, event)

    def send(self, sender: str, receiver: str, event: Event) -> None:
        """Deliver a message some time later, behind all earlier ones of its channel."""
        channel = (sender, receiver)
        slowness = self.rng.choice((0.001, 0.01, 0.1, 1.0))
        due = self.now + self.rng.random() * slowness
        self._channel_free[channel] = due = max(due, self._channel_free.get(channel, 0.0))
        self._at(due, event)

    def _at(self, time: float, event: Event) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def step(self) -> bool:
        """Let the next event happen; False: there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


class Device:
    """Runs a worker's steps one after another, each as long as it likes."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._free_at = 0.0

    def run(self, done: Event, *, marks: Sequence[Event] = ()) -> None:
        """Start one more step behind those that run; ``done`` when it has completed.

        ``marks`` happen in between, at equal distances.
        """
        duration = self._simulation.rng.choice((0.001, 0.01, 0.05))
        begin = max(self._free_at, self._simulation.now)
        self._free_at = begin + duration
        for number, mark in enumerate(marks, start=1):
            at = begin + duration * number / (len(marks) + 1)
            self._simulation.after(at - self._simulation.now, mark)
        self._simulation.after(self._free_at - self._simulation.now, done)
