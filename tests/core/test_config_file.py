"""What YAML lets pass and a config must not have is refused, at its line and column.

The failure guarded against: a key given twice of which the last one counts in silence, an anchor
that carries a value where nobody reads it, a traceback from the depths of a YAML library.
"""

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from core.config import SluiceConfig
from core.config_file import MAX_FILE_NBYTES, parse_yaml, read_config_file
from core.config_layers import ConfigLayer, Origin, layer_of
from core.errors import ConfigError
from core.messages import Role


def refusal(content: str | bytes, folder: Path) -> str:
    file = folder / "f.yaml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as caught:
        read_config_file(file)
    line = str(caught.value)
    assert "\n" not in line
    return line.replace(str(file), "f.yaml")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (
            "cache:\n  block_size: 8\n  poison: true\n  block_size: 16\n",
            "f.yaml:4:3: cache.block_size is given twice, first in line 2; leave one out",
        ),
        ("cache: {}\ncache: {}\n", "f.yaml:2:1: cache is given twice, first in line 1"),
        ("cache:\n\tblock_size: 8\n", "f.yaml:2:1: not YAML: a tab; indent with spaces"),
        (
            "a: &x {b: 1}\nc: *x\n",
            "f.yaml:1:4: &x: anchors and aliases are not taken; write the value at each place",
        ),
        ("cache: *x\n", "f.yaml:1:8: *x: anchors and aliases are not taken"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2:1: a second document; leave out the line ---"),
        ("a: {b: [1}\n", "f.yaml:1:10: not YAML: expected ',' or ']', but got '}'"),
        ("a: 1\n b: 2\n", "f.yaml:2:3: not YAML: mapping values are not allowed here; check the"),
        ("a: @x\n", "put the value in quotes"),
        ('a: "x\n', "f.yaml:2:1: not YAML: found unexpected end of stream"),
        ("? [1]\n: 2\n", "f.yaml:1:3: a key must be a name, and this is a collection"),
        ("a: !!python/object:os.system 1\n", "f.yaml:1:4: not YAML: could not determine"),
        ("a: 2026-13-13\n", "f.yaml:1:4: '2026-13-13' is no value: month must be in 1..12"),
        (f"a: {'9' * 5000}\n", "is no value: Exceeds the limit"),
        ("a: \x00\n", "f.yaml: not YAML: unacceptable character #x0000"),
        (b"a: \xff\n", "config file f.yaml: not YAML: byte 4 is not UTF-8 text"),
        ("[" * 5000, "f.yaml:1:9: nested deeper than 8 levels"),
        ("a: {" * 5000, "nested deeper than 8 levels"),
        ("a" * (MAX_FILE_NBYTES + 1), "config file f.yaml: larger than 128 KiB; is this the"),
        ("cache: [" + "1," * 5000 + "]", "f.yaml:1:8003: more than 4000 values; is this a config?"),
        ("- cache\n", "config file f.yaml: the top level must be a mapping of sections"),
        ("cache", "the top level must be a mapping of sections"),
    ],
)
def test_what_a_config_must_not_have_is_refused_at_its_place(
    content: str | bytes, line: str, tmp_path: Path
) -> None:
    assert line in refusal(content, tmp_path)


def test_a_folder_and_a_missing_file_are_no_config(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "no", "No such file")):
        with pytest.raises(ConfigError, match=f"config file {path}: {reason}"):
            read_config_file(path)


@pytest.mark.parametrize("content", ["", "# nothing yet\n", "---\n", "null\n"])
def test_a_file_that_says_nothing_leaves_the_defaults(content: str, tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(content)
    assert SluiceConfig.load(file) == SluiceConfig()


def test_each_fault_comes_with_its_line_and_column(tmp_path: Path) -> None:
    content = """
cache:
  block_size: 0
decode:
  cache: {kv_dtype: int4}
  engine:
    layer_ranges: 2
transfer:
  lease_s: 5
  renew_interval_s: 4
router: 8000
"""
    file = tmp_path / "f.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        SluiceConfig.load(file)
    told = str(caught.value).replace(str(file), "f.yaml").split("; f")
    assert [part.partition(" (got")[0] for part in told] == [
        "f.yaml:3:3: cache.block_size: Input should be greater than 0",
        ".yaml:10:3 and f.yaml:9:3: transfer: renew_interval_s must be at most half of lease_s",
        ".yaml:11:1: router: must be a mapping of fields; without any, leave it out",
        ".yaml:5:11: decode.cache.kv_dtype: Input should be 'auto' or 'float8_e4m3'",
        ".yaml:7:5: decode.engine.layer_ranges: unknown; did you mean transfer.layer_ranges?",
    ]


def test_a_thousand_faults_are_told_by_ten_and_a_number(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("".join(f"no_{index}: 1\n" for index in range(1000)))
    with pytest.raises(ConfigError) as caught:
        SluiceConfig.load(file)
    line = str(caught.value)
    assert line.count("unknown") == 10
    assert line.endswith("; and 990 more")


CHOSEN = ("cache", "transfer")
CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "cache": st.fixed_dictionaries(
            {},
            optional={
                "host_tier_gib": st.sampled_from([0, 1]),
                "storage_gib": st.sampled_from([None, 1]),
                "storage_url": st.sampled_from([None, "file:///kv", "kv"]),
                "prefix_caching": st.booleans(),
            },
        ),
        "transfer": st.fixed_dictionaries(
            {},
            optional={
                "lease_s": st.sampled_from([1, 30]),
                "renew_interval_s": st.sampled_from([0.4, 5, -1]),
            },
        ),
    },
)


@given(CHOICES, CHOICES, CHOICES)
def test_what_is_found_good_can_be_had_by_every_role(
    content: dict[str, Any], prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    whole = {**content, "prefill": prefill, "decode": decode}
    if SluiceConfig.find_faults(whole):
        with pytest.raises(ValidationError):
            _of_roles(whole)
        return
    for role, own in _of_roles(whole).items():
        merged = {name: {**content.get(name, {}), **whole[role].get(name, {})} for name in CHOSEN}
        wanted = SluiceConfig.parse(merged, source="merged")
        assert (own.cache, own.transfer) == (wanted.cache, wanted.transfer)


def _of_roles(content: dict[str, Any]) -> dict[str, SluiceConfig]:
    config = SluiceConfig.model_validate(content)
    return {role: config.for_role(role) for role in get_args(Role)}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.dictionaries(st.text("abc_", min_size=1, max_size=4), inner, max_size=3),
        max_leaves=8,
    )
)
def test_what_is_written_is_read(value: object) -> None:
    assert parse_yaml(yaml.safe_dump(value), source="f")[0] == value


@given(st.text("ab:{}[]&*!|>-?#\"'\t\n ,%@0.", max_size=40))
def test_any_text_is_values_or_one_error_of_ours(text: str) -> None:
    def outcome() -> str:
        try:
            return " ".join(map(str, parse_yaml(text, source="f")[1].values()))
        except ConfigError as error:
            return str(error)

    assert outcome() == "" or outcome().startswith("f:")


# Layers


FILE = ConfigLayer(
    {"cache": {"block_size": 8, "poison": True}, "model": 3},
    {
        (): Origin("f"),
        ("cache",): Origin("f", 1, 1),
        ("cache", "block_size"): Origin("f", 2, 3),
        ("cache", "poison"): Origin("f", 3, 3),
        ("model",): Origin("f", 4, 1),
    },
)


def test_a_value_of_a_higher_layer_wins_with_its_origin_and_leaves_the_rest() -> None:
    both = FILE.under(layer_of(("cache", "block_size"), 32, Origin("--set")))
    assert both.content["cache"] == {"block_size": 32, "poison": True}
    assert str(both.origin_of(("cache", "block_size"))) == "--set"
    assert str(both.origin_of(("cache", "poison"))) == "f:3:3"
    assert str(both.origin_of(("router", "port"))) == "f"


def test_a_mapping_of_a_higher_layer_adds_its_fields() -> None:
    both = FILE.under(layer_of(("cache",), {"block_size": 4}, Origin("E")))
    assert both.content["cache"] == {"block_size": 4, "poison": True}
    assert str(both.origin_of(("cache", "block_size"))) == "E"


def test_a_section_taken_away_takes_the_origins_of_its_fields_along() -> None:
    both = FILE.under(layer_of(("cache",), None, Origin("E")))
    assert both.content["cache"] is None
    assert str(both.origin_of(("cache", "block_size"))) == "E"


def test_a_file_whose_section_is_no_mapping_is_refused_and_not_papered_over() -> None:
    both = FILE.under(layer_of(("model", "model"), "x", Origin("--model")))
    with pytest.raises(
        ConfigError, match=r"^f:4:1: model: must be a mapping of fields; .*\(got 3\)$"
    ):
        SluiceConfig.of(both)
