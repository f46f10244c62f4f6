"""Every order of events that causality allows, each played on fresh state machines."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar


class Race(Protocol):
    """One schedule in the making."""

    done: list[str]
    """Events that have happened, in order."""

    def actions(self) -> Mapping[str, Callable[[], None]]:
        """Return what may happen next, by name; nothing: the schedule is over."""
        ...


SomeRace = TypeVar("SomeRace", bound=Race)


def every_schedule(make: Callable[[], SomeRace]) -> Iterator[SomeRace]:
    """Play every schedule to its end; ``make`` begins one anew."""
    prefixes: list[list[str]] = [[]]
    while prefixes:
        race = make()
        for name in prefixes.pop():
            _take(race, name)
        while choices := list(race.actions()):
            prefixes += [[*race.done, other] for other in choices[1:]]
            _take(race, choices[0])
        yield race


def _take(race: Race, name: str) -> None:
    race.actions()[name]()
    race.done.append(name)
