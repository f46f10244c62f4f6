"""Groups of equal bytes out of any mix of layers and heads, and the arithmetic of heads.

One pool serves all groups by block ids alone, so a group whose blocks had other bytes would read
and write its neighbours'.
"""

import itertools
from typing import Any

import msgspec
import pytest

from core.config import HeadWindowConfig, SluiceConfig
from core.errors import ConfigError
from core.kv_heads import heads_of_rank, num_windowed_heads, with_head_window
from core.kv_layout import HeadWindow, KVGroup, KVLayout, LayerSpec, group_layers


def layout_of(*layers: LayerSpec) -> KVLayout:
    return group_layers(layers, block_size=16, dtype="float32")


def test_g15_without_windows_of_heads_groups_name_no_heads() -> None:
    layers = [LayerSpec(4, 8, window=window) for window in (32, 32, None, 32, 32, None)]

    assert layout_of(*layers).groups == (
        KVGroup(layers=(0, 1), window=32),
        KVGroup(layers=(3, 4), window=32),
        KVGroup(layers=(2, 5)),
    )


def test_g06_half_of_the_heads_have_the_window() -> None:
    wanted = HeadWindowConfig(window=64, sink=32, ratio=0.5)

    layout = layout_of(*with_head_window([LayerSpec(4, 8)] * 3, wanted))

    assert layout.groups == (
        KVGroup(layers=(0, 1, 2), window=64, num_sinks=32, heads=(0, 1)),
        KVGroup(layers=(0, 1, 2), heads=(2, 3)),
    )
    assert layout.layer_nbytes == 2 * 16 * 2 * 8 * 4
    assert layout.block_nbytes == 3 * 2 * 16 * 2 * 8 * 4
    assert layout.token_nbytes == 3 * 2 * 4 * 8 * 4


def test_layers_and_heads_are_split_by_what_divides_all() -> None:
    """Four layers with six heads, four of them windowed, beside two layers with a window."""
    wanted = HeadWindowConfig(window=8, heads=(0, 2, 3, 5))
    plain = [LayerSpec(6, 8, window=99 if layer in (1, 4) else None) for layer in range(6)]

    layout = layout_of(*with_head_window(plain, wanted))

    assert (layout.layers_per_group, layout.heads_per_group, layout.num_layers) == (2, 2, 6)
    pairs = [
        pair
        for group in layout.groups
        for pair in itertools.product(group.layers, layout.heads_of(group))
    ]
    assert sorted(pairs) == [*itertools.product(range(6), range(6))]
    for group in layout.groups:
        for layer, head in itertools.product(group.layers, layout.heads_of(group)):
            windowed = 99 if layer in (1, 4) else 8 if head in (0, 2, 3, 5) else None
            assert group.window == windowed
    assert layout.token_nbytes == 6 * 2 * 6 * 8 * 4


def test_all_heads_may_have_the_window() -> None:
    window = HeadWindow(heads=(0, 1), window=8)

    assert layout_of(LayerSpec(2, 8, head_window=window)).groups == (KVGroup((0,), window=8),)


def test_layers_of_different_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="different KV shapes"):
        layout_of(LayerSpec(2, 8), LayerSpec(4, 8))


@pytest.mark.parametrize(
    ("num_kv_heads", "ratio", "count"),
    [(1, 0.5, 1), (3, 0.5, 2), (8, 0.25, 2), (4, 0, 0), (3, 0.67, 2), (3, 2 / 3, 2), (5, 1, 5)],
)
def test_g06_how_many_heads_a_ratio_is(num_kv_heads: int, ratio: float, count: int) -> None:
    assert num_windowed_heads(num_kv_heads, ratio) == count


@pytest.mark.parametrize(
    ("num_kv_heads", "num_ranks", "heads"),
    [
        (2, 4, [[0], [0], [1], [1]]),
        (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (1, 3, [[0], [0], [0]]),
        (3, 1, [[0, 1, 2]]),
        (4, 4, [[0], [1], [2], [3]]),
    ],
)
def test_c16_ranks_split_heads_or_hold_copies(
    num_kv_heads: int, num_ranks: int, heads: list[list[int]]
) -> None:
    held = [
        [*heads_of_rank(num_kv_heads, rank=rank, num_ranks=num_ranks)] for rank in range(num_ranks)
    ]

    assert held == heads
    assert {len(of_rank) for of_rank in held} == {max(1, num_kv_heads // num_ranks)}


def test_g15_every_rank_forms_the_same_groups() -> None:
    wanted = HeadWindowConfig(window=64, ratio=0.5)
    for num_kv_heads, num_ranks in ((8, 2), (2, 4), (8, 8)):
        held = [
            heads_of_rank(num_kv_heads, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)
        ]
        layouts = {
            layout_of(*with_head_window([LayerSpec(len(heads), 8)], wanted)) for heads in held
        }
        assert len(layouts) == 1


def test_c16_ranks_that_would_differ_in_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=4: the model's 6 KV heads"):
        heads_of_rank(6, rank=0, num_ranks=4)


@pytest.mark.parametrize(
    ("head_window", "complaint"),
    [
        ({"window": 64}, "head_window: head_window needs either ratio or heads"),
        ({"window": 64, "ratio": 0.5, "heads": [0]}, "needs either ratio or heads"),
        ({"window": 64, "heads": [1, 1]}, "must be ascending, each once"),
        ({"window": 64, "heads": []}, "at least one"),
        ({"window": 64, "ratio": 1.5}, "ratio: Input should be less than or equal to 1"),
        ({"window": 0, "ratio": 0.5}, "window: Input should be greater than 0"),
        ({"ratio": 0.5}, "window: Field required"),
    ],
)
def test_a_head_window_without_sense_is_refused(
    head_window: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        SluiceConfig.parse({"kv_groups": {"head_window": head_window}}, source="test")


def test_groups_cross_the_wire_as_they_are() -> None:
    wanted = HeadWindowConfig(window=64, sink=2, heads=(1,))
    layout = layout_of(*with_head_window([LayerSpec(2, 8)], wanted))

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayout) == layout
