"""Keys in a folder are read where a process runs: the driver may not have them at all."""

from pathlib import Path

import pytest

from core.channel import DeploymentKeys
from core.config import SluiceConfig
from core.errors import ConfigError
from core.ids import WorkerId
from core.key_files import load_keys, write_keys
from core.lifecycle import Lifecycle
from core.worker_context import WorkerContext
from deploy.supervision.services import RouterService, WorkerService, keys_of
from router.server import RouterContext


def config(folder: Path | None) -> SluiceConfig:
    security = {} if folder is None else {"keys_dir": str(folder)}
    return SluiceConfig.parse({"security": security}, source="test")


def test_without_a_folder_the_keys_are_those_of_the_deployment() -> None:
    given = DeploymentKeys.generate().of("decode")
    assert keys_of(config(None), "decode", given) is given


def test_with_a_folder_a_process_has_its_own_key_from_there(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys")
    given = DeploymentKeys.generate().of("decode")
    keys = keys_of(config(tmp_path / "keys"), "decode", given)
    assert keys.own == load_keys(tmp_path / "keys", "decode").own != given.own


def test_relative_folder_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"security\.keys_dir.*absolute path"):
        SluiceConfig.parse({"security": {"keys_dir": "keys"}}, source="test")


async def test_service_without_its_key_ends_with_one_line_that_names_the_file(
    tmp_path: Path,
) -> None:
    write_keys(tmp_path / "keys")
    given = DeploymentKeys.generate()
    for path in (tmp_path / "keys").glob("*.key"):
        path.unlink()
    router = RouterContext(
        config(tmp_path / "keys"), tmp_path, "model", given.of("router"), "127.0.0.1"
    )
    with pytest.raises(ConfigError, match=r"security\.keys_dir: .*router\.key: No such file"):
        await RouterService(router).run(Lifecycle())
    worker = WorkerContext(
        worker_id=WorkerId("decode-0"),
        config=config(tmp_path / "keys"),
        model_path=tmp_path,
        served_name="model",
        router_address="tcp://127.0.0.1:9",
        keys=given.of("decode"),
        host="127.0.0.1",
    )
    with pytest.raises(ConfigError, match=r"security\.keys_dir: .*decode\.key: No such file"):
        WorkerService("decode", worker).with_keys()
