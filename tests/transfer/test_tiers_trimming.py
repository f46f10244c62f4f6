"""A storage stays within its bound, whoever wrote to it, and never for the loss of a request."""

import asyncio
import os
from datetime import timedelta
from pathlib import Path

from core.cache_epoch import epoch_after
from tests.transfer.tier_parts import (
    EPOCH,
    NBYTES,
    Memory,
    MisbehavingStorage,
    make_tier,
    name_of,
    names_of,
    slots_of,
)
from transfer.tiers.object_storage import ObjectStorage
from transfer.tiers.storage_tier import StorageTier
from transfer.tiers.trimming import StoredObject, surplus

EPOCH_1 = epoch_after("", by="router")


def objects_of(*sizes: int) -> list[StoredObject]:
    return [
        StoredObject(f"{at}", nbytes, EPOCH + timedelta(seconds=at))
        for at, nbytes in enumerate(sizes)
    ]


def test_what_was_written_first_goes_down_to_nine_tenths() -> None:
    objects = objects_of(30, 30, 30, 30)
    assert surplus(reversed(objects), max_nbytes=120) == []
    assert surplus(reversed(objects), max_nbytes=100) == ["0"]
    assert surplus(objects, max_nbytes=90) == ["0", "1"]
    assert surplus(objects, max_nbytes=10) == ["0", "1", "2", "3"]
    assert surplus([], max_nbytes=10) == []


async def finish_trim(tier: StorageTier) -> None:
    """Return when the trim that runs, if any, is over."""
    trims = [task for task in asyncio.all_tasks() if task.get_name() == "storage-trim"]
    await asyncio.gather(*trims)
    await tier.close(timeout_s=5)


def make_old(folder: Path) -> None:
    """Let what is there be older than what is written next, however coarse the clock of files."""
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))


async def test_a_directory_is_trimmed_by_whoever_writes_to_it(tmp_path: Path) -> None:
    # Given a directory that another worker has filled, and that was reset once
    storage = ObjectStorage(tmp_path.as_uri(), timeout_s=5)
    other = make_tier(storage, Memory())
    await other.check()
    await other.mark_epoch(EPOCH_1)
    await other.write(names_of(6), slots_of(*range(6)))
    await other.close(timeout_s=5)
    make_old(tmp_path)

    # When one with a bound of four blocks writes one more
    tier = make_tier(storage, Memory(), max_nbytes=int(4.5 * NBYTES))
    assert await tier.write([name_of(7)], slots_of(0)) == [True]
    await finish_trim(tier)

    # Then its own is there, and the whole is within the bound; what is no block is not touched
    later = make_tier(storage, Memory())
    assert await later.find([name_of(7)]) == 1
    paths = [each.path for each in await storage.list_below("")]
    assert len([path for path in paths if path.endswith("-0")]) <= 4
    assert await later.check() == EPOCH_1
    await later.close(timeout_s=5)


async def test_a_storage_that_cannot_be_listed_is_written_all_the_same() -> None:
    storage = MisbehavingStorage()
    tier = make_tier(storage, Memory(), max_nbytes=NBYTES)
    assert await tier.write(names_of(3), slots_of(0, 1, 2)) == [True] * 3
    storage.fails = True

    await finish_trim(tier)

    assert len(storage.objects) == 3
