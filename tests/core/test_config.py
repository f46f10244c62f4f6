"""A config that a worker cannot run with is refused where it is read, in one line that helps.

The failure guarded against: a value that passes, and workers that end and start again for ever,
each with a traceback of its own.
"""

import math
from pathlib import Path
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel

from core.config import DeployConfig, SluiceConfig
from core.errors import ConfigError


def numbers(kind: type) -> list[tuple[str, str]]:
    """Return section and name of every field that takes ``kind``."""
    return [
        (section, name)
        for section, value in SluiceConfig()
        if isinstance(value, BaseModel)
        for name, field in type(value).model_fields.items()
        if get_origin(field.annotation) is not dict
        if kind in (field.annotation, *get_args(field.annotation))
        or any(kind in get_args(part) for part in get_args(field.annotation))
    ]


def refusal(content: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        SluiceConfig.parse(content, source="test")
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_the_fields_under_test_are_found() -> None:
    floats = numbers(float)
    assert {
        ("cache", "host_tier_gib"),
        ("cache", "storage_gib"),
        ("cache", "quarantine_fraction"),
        ("transfer", "lease_s"),
    } <= set(floats)
    assert ("model", "max_model_len") in numbers(int)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("section", "name"), numbers(float) + numbers(int))
def test_a_number_that_is_not_finite_is_refused(section: str, name: str, value: float) -> None:
    line = refusal({section: {name: value}})
    assert line == f"test: {section}.{name}: give a finite number (got {value!r})"


@pytest.mark.parametrize(("section", "name"), numbers(float))
def test_an_absurd_size_or_time_is_refused(section: str, name: str) -> None:
    line = refusal({section: {name: 1e300}})
    assert f"{section}.{name}: Input should be less than or equal to " in line
    assert line.endswith("(got 1e+300)")


@pytest.mark.parametrize(("section", "name"), numbers(int))
def test_an_absurd_number_is_refused(section: str, name: str) -> None:
    assert f"{section}.{name}: Input should be less than or equal to " in refusal(
        {section: {name: 10**30}}
    )


def test_a_yaml_infinity_is_refused_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "sluice.yaml"
    file.write_text("cache: {host_tier_gib: .inf}\n")
    with pytest.raises(ConfigError) as caught:
        SluiceConfig.load(file)
    assert str(caught.value) == f"{file}:1:9: cache.host_tier_gib: give a finite number (got inf)"


# Fields that do not go together


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (
            {"cache": {"host_tier_gib": 1, "storage_gib": 5, "block_size": 8}},
            (
                "test: cache: storage_gib bounds what is in storage: it needs storage_url"
                " (got storage_gib=5.0, storage_url=None)"
            ),
        ),
        (
            {"transfer": {"lease_s": 5, "renew_interval_s": 4, "checksums": True}},
            (
                "test: transfer: renew_interval_s must be at most half of lease_s"
                " (got renew_interval_s=4.0, lease_s=5.0)"
            ),
        ),
        (
            {"scheduler": {"reserve_blocks_min": 5, "max_num_seqs": 8}},
            (
                "test: scheduler: reserve_blocks_min must be at most reserve_blocks_initial"
                " (got reserve_blocks_min=5, reserve_blocks_initial=4)"
            ),
        ),
    ],
)
def test_a_conflict_shows_the_fields_concerned_and_no_others(
    content: dict[str, object], line: str
) -> None:
    assert refusal(content) == line


def test_a_reserve_that_cannot_decay_is_fine() -> None:
    content: dict[str, object] = {
        "scheduler": {"reserve_blocks_min": 3, "reserve_blocks_initial": 3}
    }
    assert SluiceConfig.parse(content, source="test").scheduler.reserve_blocks_min == 3


# Ports


@pytest.mark.parametrize(
    "content",
    [
        {"router": {"port": 8000, "control_port": 8000}},
        {"router": {"control_port": 8000}},  # the default of the other
    ],
)
def test_a_port_that_the_router_would_listen_on_twice_is_refused(
    content: dict[str, object],
) -> None:
    assert refusal(content) == (
        "test: router.control_port: 8000 is router.port too, and one process listens on both; "
        "give another one, or 0 for a free one"
    )


def test_a_port_taken_twice_is_told_with_both_places(tmp_path: Path) -> None:
    file = tmp_path / "sluice.yaml"
    file.write_text("router:\n  port: 8001\n  control_port: 8001\n")
    with pytest.raises(ConfigError) as caught:
        SluiceConfig.load(file)
    assert f"{file}:3:3" in str(caught.value)
    assert f"{file}:2:3" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        {"router": {"port": 0, "control_port": 0}, "metrics": {"port": 0}},
        {"router": {"port": 8000, "control_port": 8001}, "metrics": {"port": 8002}},
        {"metrics": {"port": 8000}},  # of workers, which may be on other machines
    ],
)
def test_ports_that_do_not_meet_are_fine(content: dict[str, object]) -> None:
    assert SluiceConfig.find_faults(content) == []


# Unknown names


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"cach": {}}, "cach: unknown; did you mean cache?"),
        (
            {"cache": {"host_tier_gb": 1}},
            "cache.host_tier_gb: unknown; did you mean cache.host_tier_gib?",
        ),
        ({"cache": {"Block_Size": 1}}, "cache.Block_Size: unknown; did you mean cache.block_size?"),
        (
            {"kv_groups": {"head_window": {"window": 3, "ratios": 0.5}}},
            "kv_groups.head_window.ratios: unknown; did you mean kv_groups.head_window.ratio?",
        ),
        ({"storage_url": "x"}, "storage_url: unknown; did you mean cache.storage_url?"),
        (
            {"model": {"host_tier_gib": 1}},
            "model.host_tier_gib: unknown; did you mean cache.host_tier_gib?",
        ),
        (
            {"engine": {"zzz": 1}},
            "engine.zzz: unknown; known here: num_threads, attention, tensor_parallel_size",
        ),
    ],
)
def test_an_unknown_name_comes_with_what_may_be_meant(
    content: dict[str, object], line: str
) -> None:
    assert refusal(content) == f"test: {line}"


# Storage


@pytest.mark.parametrize(
    "url",
    [
        "file:///srv/kvx",
        "file:///srv/kv blocks/",
        "memory:///",
        "s3://bucket",
        "s3://bucket/",
        "s3://my.bucket-1/a/b",
        "gs://bucket/prefix",
        "az://container/prefix",
    ],
)
def test_a_url_of_a_storage_is_taken_as_it_is(url: str) -> None:
    content: dict[str, object] = {"cache": {"host_tier_gib": 1, "storage_url": url}}
    assert SluiceConfig.parse(content, source="test").cache.storage_url == url


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("/srv/kvx", "write file:///srv/kvx (got"),
        ("//srv/kvx", "write file:///srv/kvx (got"),
        ("kv/x", "write file:///absolute/folder (got"),
        ("./a:b", "write file:///absolute/folder (got"),
        ("", "leave it out, or write file:///absolute/folder, memory:///"),
        ("  ", "leave it out"),
        (" file:///x", "has space around it"),
        ("file:///x\n", "has space around it"),
        ("file:///a?b", "leave that out"),
        ("file:relative", "write file:///absolute/folder (got"),
        ("file:", "write file:///absolute/folder (got"),
        ("file://", "write file:///absolute/folder (got"),
        ("file:///", "write file:///absolute/folder (got"),
        ("file://tmp/x", "write file:///tmp/x (got"),
        ("file:/tmp/x", "write file:///tmp/x (got"),
        ("file://localhost/tmp/x", "write file:///tmp/x (got"),
        ("memory://", "write memory:/// (got"),
        ("memory://x", "write memory:/// (got"),
        ("s3:", "write s3://bucket or s3://bucket/prefix (got"),
        ("s3://", "write s3://bucket or s3://bucket/prefix (got"),
        ("s3:///prefix", "write s3://bucket or s3://bucket/prefix (got"),
        ("s3:bucket", "write s3://bucket or s3://bucket/prefix (got"),
        ("s3://key:secret@bucket", "credentials come from the workers' environment"),
        ("gs://", "write gs://bucket or gs://bucket/prefix (got"),
        ("az://", "write az://container or az://container/prefix (got"),
        ("nope://x", "nope: is not known: write file:///absolute/folder, memory:///, s3://"),
    ],
)
def test_a_url_of_no_storage_is_refused_with_the_fix(url: str, fix: str) -> None:
    line = refusal({"cache": {"host_tier_gib": 1, "storage_url": url}})
    assert line.startswith("test: cache.storage_url: ")
    assert fix in line
    assert line.endswith(f"(got {url!r})")


def test_a_role_has_what_it_overrides_and_all_else_from_above() -> None:
    config = SluiceConfig.parse(
        {"cache": {"block_size": 8, "num_blocks": 64}, "decode": {"cache": {"block_size": 32}}},
        source="f",
    )
    decode = config.for_role("decode")
    assert (decode.cache.block_size, decode.cache.num_blocks) == (32, 64)
    assert config.for_role("prefill").cache.block_size == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"decode": {"cache": {"block_size": 0}}}, "decode.cache.block_size"),
        ({"prefill": {"cache": {"blok_size": 1}}}, "did you mean cache.block_size"),
        ({"prefill": {"router": {"port": 1}}}, "prefill.router"),
        ({"decode": {"transfer": {"lease_s": 5.0}}}, "decode.transfer: renew_interval_s"),
    ],
)
def test_a_fault_in_an_override_names_the_role(content: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        SluiceConfig.parse(content, source="f")


HEAD_WINDOW = {"head_window": {"window": 8, "ratio": 0.5}}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            {"prefill": {"transfer": {"transport": "nixl"}}},
            "transfer.transport: prefill 'nixl', decode 'auto'",
        ),
        (
            {"cache": {"block_size": 24}, "decode": {"cache": {"block_size": 16}}},
            "cache.block_size: prefill 24, decode 16: no KV can cross; let one be a multiple",
        ),
        (
            {"kv_groups": HEAD_WINDOW, "decode": {"cache": {"block_size": 32}}},
            "cache.block_size: prefill 16, decode 32: no KV can cross; with kv_groups.head_window",
        ),
        (
            {"prefill": {"cache": {"kv_dtype": "float8_e4m3"}}},
            "cache.kv_dtype: prefill 'float8_e4m3', decode 'auto'",
        ),
        (
            {"decode": {"model": {"dtype": "float32"}}},
            "model.dtype: prefill 'bfloat16', decode 'float32'",
        ),
    ],
)
def test_roles_between_which_no_kv_can_cross_are_refused(
    content: dict[str, object], told: str
) -> None:
    assert told in refusal(content)
    alone = {**content, "deploy": {"prefill": 0}}
    assert SluiceConfig.find_faults(alone) == []


@pytest.mark.parametrize(
    "content",
    [
        {"transfer": {"transport": "nixl"}},
        {"decode": {"cache": {"block_size": 64, "kv_dtype": "float8_e4m3"}}},
        {"kv_groups": HEAD_WINDOW, "prefill": {"cache": {"block_size": 32}}},
    ],
)
def test_roles_that_differ_and_can_meet_are_taken(content: dict[str, object]) -> None:
    assert SluiceConfig.find_faults(content) == []


@pytest.mark.parametrize("num_prefill", [0, 3])
def test_each_role_has_its_number_of_workers(num_prefill: int) -> None:
    deploy = DeployConfig(prefill=num_prefill, decode=2)
    assert deploy.counts == {"prefill": num_prefill, "decode": 2}
    assert "counts" not in deploy.model_dump()  # a plan is stored, and compared, by its fields
