"""What the commands that change a running deployment say of it.

The failure guarded against: an update that changes nothing and says how to take it back, so that
whoever does takes back the one before it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray

from core.config import SluiceConfig
from core.errors import ConfigError
from deploy.commands import scale
from deploy.supervision.outcome import Outcome, Refused, Taken, Unchanged

CONFIG = SluiceConfig()


class Command:
    """A method of a controller that was told to end so."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def remote(self, *_arguments: object) -> Outcome:
        return self._outcome


class Answering:
    """A controller that has one outcome for all that it is told."""

    def __init__(self, outcome: Outcome) -> None:
        self.update = self.undo = self.scale = Command(outcome)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """Return a list whose last is what the controller answers."""
    outcomes: list[Outcome] = []

    @contextmanager
    def found(name: str, _address: str | None) -> Iterator[scale.Found]:
        yield scale.Found(Answering(outcomes[-1]), name, None)

    def get(outcome: Outcome, *, timeout: float) -> Outcome:
        assert timeout == scale.CALL_TIMEOUT_S
        return outcome

    monkeypatch.setattr(scale, "_found", found)
    monkeypatch.setattr(ray, "get", get)
    return outcomes


def test_an_update_that_was_taken_says_how_to_take_it_back_there(
    outcomes: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes.append(Taken())
    assert scale.run_update("a", None, CONFIG) == 0
    assert scale.run_update("a", "10.0.0.1:6379", CONFIG) == 0
    undos = [line for line in capsys.readouterr().out.splitlines() if "--undo" in line]
    assert undos == [
        "sluice update --undo --name a takes it back",
        "sluice update --undo --name a --address 10.0.0.1:6379 takes it back",
    ]


def test_an_update_that_changes_nothing_says_so_and_offers_no_undo_which_would_take_back_another(
    outcomes: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes.append(Unchanged())
    assert scale.run_update("a", None, CONFIG) == 0
    assert capsys.readouterr().out == "a: unchanged; it goes by this config already\n"


def test_what_is_refused_is_an_error_with_the_reason(
    outcomes: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes.append(Refused("decode=0: one decode worker has to stay"))
    with pytest.raises(ConfigError, match="decode=0: one decode worker has to stay"):
        scale.run_update("a", None, CONFIG)
    with pytest.raises(ConfigError, match="decode=0"):
        scale.run_undo("a", None)
    with pytest.raises(ConfigError, match="decode=0"):
        scale.run_scale("a", None, {"decode": 0}, {})
    assert capsys.readouterr().out == ""


def test_what_is_unwise_in_it_is_told_after_it_was_taken(
    outcomes: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes.append(Taken("cache: too much"))
    assert scale.run_scale("a", None, {"decode": 500}, {}) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["a: warning: cache: too much"]


def test_a_scale_and_an_undo_offer_no_undo(
    outcomes: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes.append(Taken())
    assert scale.run_undo("a", None) == scale.run_scale("a", None, {"decode": 2}, {}) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0] for line in said] == ["a: taken", "a: taken"]
