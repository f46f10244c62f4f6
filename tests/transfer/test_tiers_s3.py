"""The object store's own client over real HTTP: errors, cut-off answers and silence end in time."""

from collections.abc import AsyncIterator

import pytest

from core.errors import ConfigError
from tests.transfer.s3_server import Mode, S3Server
from tests.transfer.tier_parts import NBYTES, TIMEOUT_S, Memory, make_tier, names_of, slots_of
from transfer.tiers.object_storage import ObjectStorage
from transfer.tiers.storage_tier import StorageTier

URL = "s3://bucket/kv"
SHORT_S = 0.5


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[S3Server]:
    async with S3Server().run() as server:
        for name, value in (
            ("AWS_ENDPOINT", server.endpoint),
            ("AWS_ACCESS_KEY_ID", "id"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
async def tier(server: S3Server, memory: Memory) -> AsyncIterator[StorageTier]:
    del server
    tier = make_tier(ObjectStorage(URL, timeout_s=TIMEOUT_S), memory)
    yield tier
    await tier.close(timeout_s=5)


async def test_blocks_come_back_from_an_object_store(
    server: S3Server, tier: StorageTier, memory: Memory
) -> None:
    await tier.check()
    memory.slots[0][:] = bytes([7]) * NBYTES

    assert await tier.write(names_of(2), slots_of(0, 1)) == [True, True]
    assert all(path.startswith("bucket/kv/") for path in server.objects)
    assert await tier.find(names_of(4)) == 2
    assert await tier.read(names_of(3), slots_of(5, 6, 7)) == [True, True, False]
    assert bytes(memory.slots[5]) == bytes([7]) * NBYTES


@pytest.mark.parametrize("mode", ["errors", "hangs", "cuts"])
async def test_an_object_store_in_trouble_is_a_miss(
    mode: Mode, server: S3Server, tier: StorageTier, memory: Memory
) -> None:
    assert await tier.write(names_of(2), slots_of(0, 1)) == [True, True]
    before = bytes(memory.slots[6])
    server.mode = mode

    if mode == "hangs":  # for good: only its deadline ends a call
        impatient = make_tier(ObjectStorage(URL, timeout_s=SHORT_S), memory, timeout_s=SHORT_S)
        assert await impatient.read(names_of(2), slots_of(6, 7)) == [False, False]
        assert not impatient.breaker.is_open
        await impatient.close(timeout_s=5)
    else:
        assert await tier.read(names_of(2), slots_of(6, 7)) == [False, False]

    assert bytes(memory.slots[6]) == before
    server.mode = "works"
    assert await tier.read(names_of(2), slots_of(6, 7)) == [True, True]


async def test_an_object_store_that_is_not_there_stops_the_start(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    tier = make_tier(ObjectStorage("s3://bucket", timeout_s=TIMEOUT_S), memory)
    with pytest.raises(ConfigError, match=r"cache\.storage_url: test:// cannot be used: put"):
        await tier.check()
    await tier.close(timeout_s=5)
