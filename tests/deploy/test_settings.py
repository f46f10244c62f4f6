"""The command line wins over the file, the file over the defaults, and all of it is validated."""

from pathlib import Path

import pytest

from core.config import SluiceConfig
from core.errors import ConfigError
from deploy.settings import load_settings


def test_without_file_and_arguments_the_defaults_hold() -> None:
    assert load_settings(None, {"router.port": None}) == SluiceConfig()


def test_the_command_line_wins_over_the_file_and_leaves_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "sluice.yaml"
    file.write_text("router: {port: 9000, max_attempts: 7}\nmodel: {dtype: float32}\n")
    config = load_settings(file, {"router.port": 9001, "deploy.prefill": 0, "model.model": None})
    assert (config.router.port, config.router.max_attempts) == (9001, 7)
    assert config.model.dtype == "float32"
    assert config.deploy.prefill == 0


def test_a_wrong_argument_is_told_from_a_wrong_file(tmp_path: Path) -> None:
    file = tmp_path / "sluice.yaml"
    file.write_text("log_level: info\n")
    with pytest.raises(ConfigError, match=r"command line: router\.port"):
        load_settings(file, {"router.port": -1})


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[2].glob("examples/*.yaml")), ids=lambda path: path.name
)
def test_every_example_config_loads(path: Path) -> None:
    SluiceConfig.load(path)


@pytest.mark.parametrize(("value", "poison"), [("1", True), ("0", False), ("", True)])
def test_i08_the_environment_turns_poison_on_and_off(
    value: str, poison: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sluice.yaml"
    file.write_text("cache: {poison: true, block_size: 8}\n")
    monkeypatch.setenv("SLUICE_POISON", value)
    config = load_settings(file, {})
    assert (config.cache.poison, config.cache.block_size) == (poison, 8)


def test_an_unclear_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_POISON", "yes")
    with pytest.raises(ConfigError, match="SLUICE_POISON='yes'"):
        load_settings(None, {})
