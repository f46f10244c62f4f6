"""What an operator is told of UCX's devices is what UCX would use, under the same settings."""

import pytest

from core.errors import ConfigError
from transfer.ucx_devices import find_devices

pytestmark = pytest.mark.ucx


def test_the_devices_of_this_machine_are_named_by_transport() -> None:
    devices = find_devices({})
    assert "cma/memory" in devices
    assert any(device.startswith("tcp/") for device in devices)


def test_settings_limit_the_devices() -> None:
    assert {device.partition("/")[0] for device in find_devices({"TLS": "tcp"})} == {"tcp"}


def test_a_wrong_setting_is_told() -> None:
    with pytest.raises(ConfigError, match="NO_SUCH_SETTING"):
        find_devices({"NO_SUCH_SETTING": "1"})
