"""The command line wins over the file, the file over the defaults, and all of it is validated."""

from pathlib import Path

import pytest

from core.config import SluiceConfig
from core.errors import ConfigError
from deploy.config.advice import advise
from deploy.config.settings import load_settings
from deploy.doctor.machine import Machine


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
    with pytest.raises(ConfigError, match=r"^--port: router\.port: .*\(got -1\)$"):
        load_settings(file, {"router.port": -1})


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[2].glob("examples/*.yaml")), ids=lambda path: path.name
)
def test_every_example_config_loads_without_a_warning(path: Path, tmp_path: Path) -> None:
    nowhere = Machine(tmp_path)
    assert advise(SluiceConfig.load(path), nowhere) == []


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


# The environment and --set


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sluice.yaml"
    path.write_text("cache: {block_size: 8, memory_gib: 2}\nrouter: {port: 9000}\n")
    return path


def test_defaults_then_file_then_environment_then_set_then_flags(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def port(flag: int | None, *assignments: str) -> int:
        return load_settings(file, {"router.port": flag}, assignments).router.port

    assert SluiceConfig().router.port == 8000
    assert port(None) == 9000
    monkeypatch.setenv("SLUICE__ROUTER__PORT", "9001")
    assert port(None) == 9001
    assert port(None, "router.port=9002") == 9002
    assert port(None, "router.port=9002", "router.port=9003") == 9003
    assert port(9004, "router.port=9002") == 9004
    assert load_settings(file, {}).cache.block_size == 8


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("CACHE__BLOCK_SIZE", "32", "cache.block_size", 32),
        ("CACHE__POISON", "true", "cache.poison", True),
        ("CACHE__NUM_BLOCKS", "null", "cache.num_blocks", None),
        ("LOG_LEVEL", "debug", "log_level", "debug"),
        ("TRACE_REQUESTS", "0", "trace_requests", 0),
        ("MODEL__REVISION", "1234567", "model.revision", "1234567"),
        ("MODEL__REVISION", "1e5", "model.revision", "1e5"),
        ("MODEL__REVISION", "'007'", "model.revision", "007"),
        ("MODEL__REVISION", "null", "model.revision", None),
        ("MODEL__MODEL", "no", "model.model", "no"),
        ("ROUTER__HOST", "::", "router.host", "::"),
        ("SECURITY__KEYS_DIR", "/etc/keys", "security.keys_dir", Path("/etc/keys")),
        ("DECODE__CACHE__BLOCK_SIZE", "32", "decode", {"cache": {"block_size": 32}}),
        ("PREFILL", "{cache: {memory_gib: 8}}", "prefill", {"cache": {"memory_gib": 8}}),
        ("KV_GROUPS__HEAD_WINDOW", "{window: 8, heads: [0]}", "kv_groups.head_window.heads", (0,)),
    ],
)
def test_every_kind_of_field_can_be_given_by_variable_and_by_set(
    name: str, text: str, path: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(config: SluiceConfig) -> object:
        found: object = config
        for part in path.split("."):
            found = getattr(found, part)
        return found

    assignment = f"{name.lower().replace('__', '.')}={text}"
    assert given(load_settings(None, {}, [assignment])) == value
    monkeypatch.setenv(f"SLUICE__{name}", text)
    assert given(load_settings(None, {})) == value


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        (
            "CACHE__BLOCK_SIZE",
            "many",
            "cache.block_size: Input should be a valid integer",
        ),
        ("CACH__BLOCK_SIZE", "1", "cach: unknown; did you mean cache?"),
        ("CACHE__BLOK_SIZE", "1", "cache.blok_size: unknown; did you mean cache.block_size?"),
        ("CACHE__BLOCK_SIZE", "[1", ": not YAML: expected"),
        ("CACHE____BLOCK_SIZE", "1", "write it in capitals, such as SLUICE__ROUTER__PORT"),
        ("cache__block_size", "1", "write it in capitals, such as SLUICE__ROUTER__PORT"),
    ],
)
def test_a_wrong_variable_is_named(
    name: str, text: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"SLUICE__{name}", text)
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {})
    assert str(caught.value).startswith(f"environment variable SLUICE__{name}:")
    assert line in str(caught.value)


def test_an_empty_variable_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE__CACHE__BLOCK_SIZE", "")
    assert load_settings(None, {}) == SluiceConfig()


@pytest.mark.parametrize("assignment", ["cache.block_size", "=3", "cache.=3", "cache..x=3", ""])
def test_a_set_without_field_or_value_says_how_to_write_it(assignment: str) -> None:
    with pytest.raises(ConfigError, match=r"write section\.field=value, such as cache\.block_size"):
        load_settings(None, {}, [assignment])


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("cache.block_size=many", "Input should be a valid integer, unable to parse"),
        ("cache.blok_size=1", "unknown; did you mean cache.block_size?"),
        ("prefill.cache.block_size=0", "Input should be greater than 0 (got 0)"),
        ("router.control_port=8000", "8000 is router.port too"),
        ("cach.block_size=1", "cach: unknown; did you mean cache?"),
        (
            "router.port=[",
            "not YAML: expected the node content, but found '<stream end>' (got '[')",
        ),
        ("deploy.name=No_Name", "give 1 to 63 lower-case letters, digits and hyphens, no hyphen"),
    ],
)
def test_a_wrong_set_names_its_field_once(assignment: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {}, [assignment])
    text, name = str(caught.value), assignment.partition("=")[0]
    assert text.startswith(f"--set {name}: {told}")
    assert text.count(name) == 1


def test_a_conflict_names_both_places(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--set transfer\.renew_interval_s: transfer: renew"):
        load_settings(file, {}, ["transfer.renew_interval_s=20"])
    file.write_text("transfer:\n  lease_s: 20\n")
    with pytest.raises(
        ConfigError, match=rf"^--set transfer\.renew_interval_s and {file}:2:3: transfer: renew"
    ):
        load_settings(file, {}, ["transfer.renew_interval_s=20"])
