"""A tier that cannot work stops the start, with a line that names the field and the fix."""

import pytest

from blockmgr.tier_book import TierBounds
from core.config import CacheConfig, SluiceConfig
from core.errors import ConfigError
from core.kv_layout import KVGroup, KVLayout

LAYOUT = KVLayout(
    groups=(KVGroup(layers=(0,)),), block_size=16, num_kv_heads=1, head_dim=64, dtype="float32"
)


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        ({"storage_url": "file:///kv"}, "storage_url needs host_tier_gib > 0"),
        ({"host_tier_gib": 1, "prefix_caching": False}, "needs prefix_caching: true"),
        ({"host_tier_gib": 1, "storage_gib": 5}, "it needs storage_url"),
        ({"host_tier_gib": -1}, "host_tier_gib"),
        ({"host_tier_gib": 1, "host_copy_fraction": 0}, "host_copy_fraction"),
    ],
)
def test_a_config_without_sense_is_refused(cache: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        SluiceConfig.parse({"cache": cache}, source="test")


def test_tiers_are_off_by_default_and_bounded_where_they_are_on() -> None:
    assert TierBounds.of(CacheConfig(), LAYOUT, num_blocks=100) is None

    cache = CacheConfig(host_tier_gib=1, storage_url="file:///kv", storage_staging_mib=1)
    bounds = TierBounds.of(cache, LAYOUT, num_blocks=100)

    assert bounds is not None
    assert bounds.num_slots == 2**30 // LAYOUT.block_nbytes
    assert bounds.max_copied_blocks == 50
    assert bounds.max_staged_blocks == 2**20 // LAYOUT.block_nbytes


@pytest.mark.parametrize(
    ("nbytes", "least"), [(8192, "0.000008"), (368640, "0.000344"), (2**27, "0.125001")]
)
def test_a_host_tier_that_holds_no_block_is_refused_with_the_least_that_works(
    nbytes: int, least: str
) -> None:
    layout = KVLayout(
        groups=(KVGroup(layers=(0,)),),
        block_size=16,
        num_kv_heads=1,
        head_dim=nbytes // 128,
        dtype="float32",
    )
    reason = rf"cache\.host_tier_gib: 1e-09 holds no block of {nbytes} bytes; give .* {least}$"
    with pytest.raises(ConfigError, match=reason):
        TierBounds.of(CacheConfig(host_tier_gib=1e-9), layout, num_blocks=100)

    bounds = TierBounds.of(CacheConfig(host_tier_gib=float(least)), layout, num_blocks=100)

    assert bounds is not None
    assert bounds.num_slots == 1


def test_a_staging_part_that_holds_no_block_is_refused_with_the_least_that_works() -> None:
    layout = KVLayout(
        groups=(KVGroup(layers=(0,)),),
        block_size=16,
        num_kv_heads=1,
        head_dim=2**14,
        dtype="float32",
    )
    cache = CacheConfig(host_tier_gib=1, storage_staging_mib=1)
    reason = r"cache\.storage_staging_mib: 1 holds no block of 2097152 bytes; give at least 2$"
    with pytest.raises(ConfigError, match=reason):
        TierBounds.of(cache, layout, num_blocks=100)
