"""Each content of a followed file is handed on once, whatever becomes of it."""

import logging
from pathlib import Path

import pytest

from core.config import SluiceConfig
from core.errors import SluiceError
from deploy.config.settings import load_settings
from deploy.config.watch import ConfigWatch


class Deployment:
    """Takes configs as told."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.answers: list[str | SluiceError | None] = []

    def apply(self, config: SluiceConfig) -> str | None:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, SluiceError):
            raise answer
        self.taken.append(config.deploy.decode)
        return answer


def test_changes_are_handed_on_once_and_those_not_taken_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "config.yaml"
    watch = ConfigWatch(file, lambda: load_settings(file, {}))
    deployment = Deployment()

    def look(content: str | None = None) -> list[str]:
        caplog.clear()
        if content is not None:
            file.write_text(content)
            if deployment.taken:
                watch.look(deployment.apply)
                assert caplog.records == [], "it may be half written"
        watch.look(deployment.apply)
        return [record.message.split()[0] for record in caplog.records]

    assert look() == []  # away
    assert look("deploy: {decode: 2}") == ["event=config_applied"]
    assert look() == []
    # A wrong one is told once, one that cannot be, too
    assert look("deploy: {decode: many}") == ["event=config_ignored"]
    assert look() == []
    deployment.answers = ["security: cannot change"]
    assert look("deploy: {decode: 3}") == ["event=config_ignored"]
    assert look() == []
    # One that nobody heard is tried again
    deployment.answers = [SluiceError("no answer")]
    assert look("deploy: {decode: 4}") == ["event=config_waits"]
    assert look() == ["event=config_applied"]
    file.unlink()
    assert look() == []
    assert deployment.taken == [2, 3, 4]


def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("deploy: {decode: 2}")
    watch = ConfigWatch(file, lambda: load_settings(file, {}))
    deployment = Deployment()
    watch.look(deployment.apply)
    for content in ("", "deploy: {prefill: 4}", "deploy: {prefill: 4, decode: 5}"):
        file.write_text(content)
        watch.look(deployment.apply)
    assert deployment.taken == [2], "no half of it, though each half is a config"
    watch.look(deployment.apply)
    assert deployment.taken == [2, 5]


def test_a_file_replaced_between_look_and_load_is_loaded_at_the_next_looks(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("deploy: {decode: 2}")
    replaced = ["deploy: {decode: 3}"]

    def load() -> SluiceConfig:
        if replaced:
            file.write_text(replaced.pop())
        return load_settings(file, {})

    watch = ConfigWatch(file, load)
    deployment = Deployment()
    for _ in range(4):
        watch.look(deployment.apply)
    assert deployment.taken == [3]
