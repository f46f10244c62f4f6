"""Peers whose KV differs in meaning are refused before any byte moves, with reason and fix."""

import msgspec
import pytest

from core.errors import HandshakeError
from core.kv_layout import KVGroup, KVLayout
from core.messages import Compatibility
from transfer.handshake import check_compatible

LAYOUT = KVLayout((KVGroup((0, 1)),), 16, num_kv_heads=3, head_dim=64, dtype="bfloat16")
MINE = Compatibility(
    model_fingerprint="m1", tokenizer_fingerprint="t1", kv_layout=LAYOUT, total_kv_heads=3
)


def with_layout(**changes: object) -> Compatibility:
    return msgspec.structs.replace(MINE, kv_layout=msgspec.structs.replace(LAYOUT, **changes))


def test_equal_peers_are_paired() -> None:
    check_compatible(MINE, msgspec.structs.replace(MINE))


@pytest.mark.parametrize(
    ("theirs", "name", "values"),
    [
        (msgspec.structs.replace(MINE, model_fingerprint="m2"), "model_fingerprint", "m2"),
        (msgspec.structs.replace(MINE, tokenizer_fingerprint="t2"), "tokenizer", "t2"),
        (msgspec.structs.replace(MINE, tensor_parallel_size=2), "tensor_parallel_size", "2"),
        (with_layout(block_size=32), "kv_layout.block_size", "32"),
        (with_layout(num_kv_heads=1), "kv_layout.num_kv_heads", "1"),
        (with_layout(head_dim=128), "kv_layout.head_dim", "128"),
        (with_layout(dtype="float32"), "kv_layout.dtype", "float32"),
        (with_layout(groups=(KVGroup((0,)),)), "kv_layout.groups", "KVGroup"),
        (with_layout(groups=(KVGroup((0, 1), window=8),)), "kv_layout.groups", "window=8"),
        (with_layout(groups=(KVGroup((0, 1), heads=(0,)),)), "kv_layout.groups", "heads=(0,)"),
    ],
)
def test_c15_each_difference_is_refused_with_both_values_and_a_fix(
    theirs: Compatibility, name: str, values: str
) -> None:
    with pytest.raises(HandshakeError) as raised:
        check_compatible(MINE, theirs)
    message = str(raised.value)
    assert name in message
    assert values in message
    assert "here" in message
    assert "(" in message.split(name, 1)[1], "a fix in parentheses"


def test_c15_all_differences_are_listed_at_once() -> None:
    theirs = msgspec.structs.replace(with_layout(block_size=32, dtype="float32"))
    with pytest.raises(HandshakeError, match=r"block_size.*dtype"):
        check_compatible(MINE, theirs)


def test_h09_a_peer_without_a_safety_feature_is_refused() -> None:
    theirs = msgspec.structs.replace(MINE, features=("lease", "generation"))
    with pytest.raises(HandshakeError, match="lacks withdraw"):
        check_compatible(MINE, theirs)
    with pytest.raises(HandshakeError, match="relies on withdraw"):
        check_compatible(theirs, MINE)


def test_every_field_that_is_compared_has_a_fix() -> None:
    with pytest.raises(HandshakeError) as raised:
        check_compatible(
            MINE,
            Compatibility(
                model_fingerprint="x",
                tokenizer_fingerprint="x",
                total_kv_heads=9,
                tensor_parallel_size=9,
                features=(),
                kv_layout=KVLayout((), 1, num_kv_heads=9, head_dim=9, dtype="float16"),
            ),
        )
    assert str(raised.value).count("(") >= 10
