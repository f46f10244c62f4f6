"""A storage may fail, hang, lose and change what it holds; a block from it is right or not used.

The calls must also come back: a request waits for them, and the slots that they fill are pinned.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.cache_epoch import epoch_after
from core.errors import ConfigError, StorageError
from tests.transfer.tier_parts import (
    FINGERPRINT,
    NBYTES,
    Memory,
    MisbehavingStorage,
    make_tier,
    name_of,
    names_of,
    slots_of,
)
from transfer.tiers.breaker import Breaker
from transfer.tiers.chain_search import count_leading
from transfer.tiers.object_storage import ObjectStorage
from transfer.tiers.storage_tier import MAX_FAILURES, RETRY_S, StorageTier
from transfer.tiers.stored_block import pack, path_of, unpack

SHORT_S = 0.05


@pytest.fixture
def memory() -> Memory:
    memory = Memory()
    for at, slot in enumerate(memory.slots):
        slot[:] = bytes([at + 100]) * NBYTES
    return memory


@pytest.fixture
def storage() -> MisbehavingStorage:
    return MisbehavingStorage()


@pytest.fixture
async def tier(storage: MisbehavingStorage, memory: Memory) -> AsyncIterator[StorageTier]:
    tier = make_tier(storage, memory)
    yield tier
    await tier.close(timeout_s=5)


@pytest.mark.parametrize("url", ["directory", "memory:///"])
async def test_blocks_come_back_from_real_storage(url: str, memory: Memory, tmp_path: Path) -> None:
    # Given a directory that is not there yet, or memory, behind the library
    url = (tmp_path / "kv store").as_uri() if url == "directory" else url
    tier = make_tier(ObjectStorage(url, timeout_s=5), memory)
    await tier.check()
    wanted = [bytes(slot) for slot in memory.slots[:3]]

    # When blocks are written, found and read into other slots
    assert await tier.write(names_of(3), slots_of(0, 1, 2)) == [True] * 3
    assert await tier.find(names_of(5)) == 3
    assert await tier.find([name_of(77)]) == 0
    assert await tier.read(names_of(4), slots_of(4, 5, 6, 7)) == [True, True, True, False]

    # Then these have the bytes, and a slot that nothing was found for is as it was
    assert [bytes(slot) for slot in memory.slots[4:7]] == wanted
    assert bytes(memory.slots[7]) == bytes([107]) * NBYTES
    await tier.close(timeout_s=5)


async def test_a_directory_shows_whole_objects_only(memory: Memory, tmp_path: Path) -> None:
    tier = make_tier(ObjectStorage(tmp_path.as_uri(), timeout_s=5), memory)
    await tier.write(names_of(1), slots_of(0))
    (path, content), *others = files_in(tmp_path)
    assert not others
    assert path == path_of(name_of(0), fingerprint=FINGERPRINT)
    assert content == pack(name_of(0), memory.view(slots_of(0)[0]), fingerprint=FINGERPRINT)
    await tier.close(timeout_s=5)


def files_in(folder: Path) -> list[tuple[str, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [(path.relative_to(folder).as_posix(), path.read_bytes()) for path in files]


@pytest.mark.parametrize("damage", ["cut", "longer", "bit", "header", "swapped", "empty"])
async def test_a_damaged_block_is_not_used(
    damage: str, tier: StorageTier, storage: MisbehavingStorage, memory: Memory
) -> None:
    await tier.write(names_of(2), slots_of(0, 1))
    path, other = (path_of(name, fingerprint=FINGERPRINT) for name in names_of(2))
    content = bytearray(storage.objects[path])
    match damage:
        case "cut":
            content = content[:-1]
        case "longer":
            content += b"\0"
        case "bit":
            content[-NBYTES // 2] ^= 1
        case "header":
            content[9] ^= 1
        case "swapped":
            content = bytearray(storage.objects[other])
        case _:
            content = bytearray()
    storage.objects[path] = bytes(content)

    assert await tier.read(names_of(2), slots_of(6, 7)) == [False, True]
    assert bytes(memory.slots[6]) == bytes([106]) * NBYTES


def test_a_block_of_another_model_or_layout_is_not_used() -> None:
    stored = pack(name_of(1), memoryview(bytes(NBYTES)), fingerprint=b"another model --")
    target = memoryview(bytearray(NBYTES))
    with pytest.raises(StorageError, match="do not match"):
        unpack(memoryview(stored), name_of(1), target, fingerprint=FINGERPRINT)


async def test_a_storage_that_hangs_ends_each_call_at_its_deadline(
    storage: MisbehavingStorage, memory: Memory
) -> None:
    patient = make_tier(storage, memory)
    assert await patient.write(names_of(2), slots_of(0, 1)) == [True, True]
    await patient.close(timeout_s=5)
    tier = make_tier(storage, memory, timeout_s=SHORT_S)
    storage.hangs = True

    assert await tier.find(names_of(2)) == 0
    assert await tier.read(names_of(2), slots_of(6, 7)) == [False, False]
    assert await tier.write(names_of(2), slots_of(0, 1)) == [False, False]

    # And what it still delivers afterwards reaches no slot
    storage.released.set()
    await asyncio.sleep(0)
    assert bytes(memory.slots[6]) == bytes([106]) * NBYTES
    await tier.close(timeout_s=5)


async def test_a_storage_that_fails_is_left_alone_for_a_while(
    tier: StorageTier, storage: MisbehavingStorage
) -> None:
    storage.fails = True
    for _ in range(MAX_FAILURES):
        assert await tier.find(names_of(1)) == 0
    assert tier.breaker.is_open
    num_calls = storage.num_calls

    assert await tier.find(names_of(1)) == 0
    assert await tier.write(names_of(1), slots_of(0)) == [False]
    assert storage.num_calls == num_calls


FIRST = epoch_after("", by="router")
SECOND = epoch_after(FIRST, by="router")
THIRD = epoch_after(SECOND, by="router")


async def test_an_epoch_is_written_before_anything_else_and_found_by_later_workers(
    tier: StorageTier, storage: MisbehavingStorage, memory: Memory
) -> None:
    assert await tier.check() == ""

    # Given a reset while the storage is away
    storage.fails = True
    assert not await tier.mark_epoch(FIRST)
    assert await tier.write(names_of(1), slots_of(0)) == [False]
    assert tier.epoch_written == ""

    # When it is back, the epoch comes first
    storage.fails = False
    assert await tier.write(names_of(1), slots_of(0)) == [True]
    assert [path.rpartition("/")[2] for path in storage.objects][1] == FIRST
    assert tier.epoch_written == FIRST

    # Then whoever starts later begins with it
    later = make_tier(storage, memory)
    assert await later.check() == FIRST
    await later.close(timeout_s=5)


async def test_a18_epochs_are_written_one_by_one_and_superseded_ones_not_at_all(
    tier: StorageTier, storage: MisbehavingStorage
) -> None:
    # Given three resets in a row, of which the first hangs in storage
    storage.hangs = True
    marks = [asyncio.create_task(tier.mark_epoch(epoch)) for epoch in (FIRST, SECOND, THIRD)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert storage.num_calls == 1

    # When it answers
    storage.released.set()

    # Then the newest follows, and nothing else
    assert await asyncio.gather(*marks) == [True] * 3
    assert [path.rpartition("/")[2] for path in storage.objects] == [FIRST, THIRD]


async def test_a18_an_epoch_that_is_written_late_undoes_no_newer_one(
    tier: StorageTier, storage: MisbehavingStorage, memory: Memory
) -> None:
    assert await tier.mark_epoch(SECOND)
    other = make_tier(storage, memory)
    assert await other.mark_epoch(FIRST)
    assert await other.check() == SECOND
    await other.close(timeout_s=5)


async def test_what_is_no_epoch_is_not_taken_for_one(
    tier: StorageTier, storage: MisbehavingStorage
) -> None:
    assert await tier.mark_epoch(FIRST)
    (path,) = storage.objects
    storage.objects[path.replace(FIRST, "zzz")] = b""
    assert await tier.check() == FIRST


def test_breaker_lets_one_call_through_per_interval_and_closes_on_success() -> None:
    breaker = Breaker(max_failures=2, retry_s=RETRY_S)
    assert not breaker.failed(0.0)
    assert breaker.allows(0.0)
    assert breaker.failed(1.0)
    assert not breaker.allows(1.0)
    assert breaker.allows(1.0 + RETRY_S)
    assert not breaker.allows(1.0 + RETRY_S)
    assert not breaker.failed(20.0)
    breaker.succeeded()
    assert breaker.allows(20.0)
    assert breaker.num_opened == 1


@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 100, 513])
async def test_a_chain_is_measured_in_few_rounds(length: int) -> None:
    for present in {0, 1, length // 3, length - 1, length} - {-1}:
        chain = Chain(present)
        assert await count_leading(chain.exists, length, width=16) == min(present, length)
        assert chain.num_rounds <= 5, (length, present)


class Chain:
    """Names of which the first ``present`` exist; counts the rounds of questions."""

    def __init__(self, present: int) -> None:
        self.present = present
        self.num_rounds = 0
        self._num_asked = 0

    async def exists(self, index: int) -> bool:
        self.num_rounds += self._num_asked == 0
        self._num_asked += 1
        await asyncio.sleep(0)
        self._num_asked -= 1
        return index < self.present


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nope://x", "recognise"),
        ("some/path", "relative"),
        ("file:///proc/no", "No such file"),
        ("az://container", "Account"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_line_that_names_the_field(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"cache.storage_url: {url}.*{reason}") as caught:
        ObjectStorage(url, timeout_s=1)
    assert "\n" not in str(caught.value)


async def test_a_storage_that_is_not_there_stops_the_start(
    storage: MisbehavingStorage, memory: Memory
) -> None:
    impatient, tier = make_tier(storage, memory, timeout_s=SHORT_S), make_tier(storage, memory)
    storage.hangs = True
    with pytest.raises(ConfigError, match="did not answer within"):
        await impatient.check()
    storage.hangs, storage.fails = False, True
    with pytest.raises(ConfigError, match="no route to host"):
        await tier.check()
    storage.fails = False
    await tier.check()
    for each in (impatient, tier):
        await each.close(timeout_s=5)
