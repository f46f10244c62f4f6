"""Peers whose KV differs in meaning are refused before any byte moves, with reason and fix."""

import msgspec
import pytest

from core.errors import ConfigError, HandshakeError
from core.ids import Incarnation
from core.kv_heads import heads_of_rank
from core.kv_layout import KVGroup, KVLayout
from core.messages import Compatibility, PoolEndpoint
from transfer.handshake import check_compatible
from transfer.pairing import PairPlan
from transfer.pool_checks import require_same_transport

LAYOUT = KVLayout((KVGroup((0, 1)),), 16, num_kv_heads=6, head_dim=64, dtype="bfloat16")
MINE = Compatibility(
    model_fingerprint="m1",
    tokenizer_fingerprint="t1",
    kv_layout=LAYOUT,
    total_kv_heads=6,
    model_dtype="bfloat16",
)


def with_layout(side: Compatibility = MINE, **changes: object) -> Compatibility:
    layout = msgspec.structs.replace(side.kv_layout, **changes)
    return msgspec.structs.replace(side, kv_layout=layout)


def with_ranks(num_ranks: int, side: Compatibility = MINE) -> Compatibility:
    side = msgspec.structs.replace(side, tensor_parallel_size=num_ranks)
    return with_layout(side, num_kv_heads=max(1, side.total_kv_heads // num_ranks))


def with_window(side: Compatibility) -> Compatibility:
    return with_layout(side, groups=(KVGroup((0, 1), window=40),))


def by_head(side: Compatibility) -> Compatibility:
    groups = (KVGroup((0, 1), heads=(0, 1, 2)), KVGroup((0, 1), window=8, heads=(3, 4, 5)))
    return with_layout(side, groups=groups)


FLOAT8 = with_layout(dtype="float8_e4m3")
OTHER_MODEL_DTYPE = msgspec.structs.replace(with_layout(dtype="float32"), model_dtype="float32")


@pytest.mark.parametrize(
    ("reader", "source"),
    [
        (MINE, msgspec.structs.replace(MINE)),
        (with_layout(block_size=32), MINE),
        (MINE, with_layout(block_size=32)),
        (with_window(MINE), with_window(with_layout(block_size=48))),
        (by_head(MINE), by_head(with_layout(block_size=48))),
        (with_ranks(3), with_ranks(2)),
        (with_ranks(12), MINE),
        (FLOAT8, MINE),
        (FLOAT8, FLOAT8),
    ],
)
def test_what_can_be_bridged_is_paired(reader: Compatibility, source: Compatibility) -> None:
    check_compatible(reader, source)


@pytest.mark.parametrize(
    ("reader", "source", "field", "values"),
    [
        (MINE, msgspec.structs.replace(MINE, model_fingerprint="m2"), "model_f", ("m1", "m2")),
        (MINE, msgspec.structs.replace(MINE, tokenizer_fingerprint="t2"), "token", ("t1", "t2")),
        (MINE, msgspec.structs.replace(MINE, total_kv_heads=3), "total_kv_heads", ("6", "3")),
        (MINE, OTHER_MODEL_DTYPE, "model_dtype", ("bfloat16", "float32")),
        (MINE, with_layout(head_dim=128), "kv_layout.head_dim", ("64", "128")),
        (MINE, with_layout(groups=(KVGroup((0,)),)), "kv_layout.groups", ("(0, 1)", "(0,)")),
        (MINE, with_window(MINE), "kv_layout.groups", ("None", "window=40")),
        (MINE, by_head(MINE), "kv_layout.groups", ("None", "heads=(0, 1, 2)")),
        (MINE, with_layout(block_size=24), "kv_layout.block_size", ("16", "24")),
        (MINE, with_layout(block_size=0), "kv_layout.block_size", ("16", "0")),
        (
            with_window(with_layout(block_size=32)),
            with_window(MINE),
            "kv_layout.block_size",
            ("32", "16"),
        ),
        (MINE, FLOAT8, "kv_layout.dtype", ("bfloat16", "float8_e4m3")),
        (MINE, with_layout(dtype="float16"), "kv_layout.dtype", ("bfloat16", "float16")),
        (FLOAT8, with_layout(dtype="float32"), "kv_layout.dtype", ("float8", "float32")),
        (MINE, with_layout(num_kv_heads=1), "kv_layout.num_kv_heads", ("prefill says 1", "have 6")),
        (MINE, with_ranks(4), "tensor_parallel_size=4", ("prefill", "6 KV heads")),
        (with_ranks(4), MINE, "tensor_parallel_size=4", ("decode", "6 KV heads")),
        (
            MINE,
            msgspec.structs.replace(MINE, tensor_parallel_size=0),
            "prefill",
            ("0 ranks", "of 6"),
        ),
        (by_head(MINE), by_head(with_ranks(2)), "tensor_parallel_size", ("1", "2")),
    ],
)
def test_c15_each_difference_is_refused_with_both_values_and_a_fix(
    reader: Compatibility, source: Compatibility, field: str, values: tuple[str, str]
) -> None:
    with pytest.raises(HandshakeError) as raised:
        check_compatible(reader, source)
    message = str(raised.value)
    assert field in message
    assert all(value in message for value in values), message
    assert "decode" in message or "prefill" in message
    assert "(" in message.split(field, 1)[1], "a fix in parentheses"


def test_c15_all_differences_are_listed_at_once() -> None:
    theirs = with_layout(block_size=24, dtype="float32")
    with pytest.raises(HandshakeError, match=r"block_size.*dtype"):
        check_compatible(MINE, theirs)


def test_c15_a_source_that_does_not_say_what_its_blocks_are_is_refused() -> None:
    with pytest.raises(HandshakeError, match="does not say"):
        PairPlan.of(MINE, None, 0)


def test_h09_a_peer_without_a_safety_feature_is_refused() -> None:
    theirs = msgspec.structs.replace(MINE, features=("lease", "generation"))
    with pytest.raises(HandshakeError, match="prefill lacks withdraw"):
        check_compatible(MINE, theirs)
    with pytest.raises(HandshakeError, match="decode lacks withdraw"):
        check_compatible(theirs, MINE)


def test_another_transport_is_refused_for_good_with_field_values_and_fix() -> None:
    endpoint = PoolEndpoint("nixl", metadata=b"", base_address=1, nbytes=1)
    told = r"transfer\.transport: decode 'ucx', prefill P 'nixl' \(set transfer\.transport to one"
    with pytest.raises(HandshakeError, match=told):
        require_same_transport("ucx", Incarnation("P"), endpoint)


@pytest.mark.parametrize(
    ("num_kv_heads", "num_ranks", "fix"),
    [(3, 2, "use 1 or 3"), (8, 12, "use 8 or 16"), (3, 2**40, "use a divisor or a multiple")],
)
def test_ranks_that_do_not_fit_are_told_with_those_that_do(
    num_kv_heads: int, num_ranks: int, fix: str
) -> None:
    with pytest.raises(ConfigError, match=f"{num_kv_heads} KV heads cannot be .*{fix}"):
        heads_of_rank(num_kv_heads, rank=0, num_ranks=num_ranks)
