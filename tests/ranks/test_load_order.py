"""N ranks that each read a model of half the memory's size would be killed at every start."""

from pathlib import Path

import pytest

from ranks.load_order import loads_at_once, model_nbytes

GIB = 2**30


@pytest.mark.parametrize(
    ("model_gib", "free_gib", "num_ranks", "at_once"),
    [(1, 16, 2, True), (4, 16, 2, True), (5, 16, 2, False), (140, 1000, 8, False), (0, 0, 2, True)],
)
def test_ranks_load_in_turn_where_whole_models_would_not_fit_beside_each_other(
    model_gib: int, free_gib: int, num_ranks: int, *, at_once: bool
) -> None:
    free = free_gib * GIB
    assert loads_at_once(model_gib * GIB, free_nbytes=free, num_ranks=num_ranks) == at_once


def test_a_model_in_float32_takes_twice_what_is_stored(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors", "config.json"):
        (tmp_path / name).write_bytes(bytes(100))
    assert model_nbytes(tmp_path, dtype="bfloat16") == 200
    assert model_nbytes(tmp_path, dtype="float32") == 400
    assert model_nbytes(tmp_path / "missing", dtype="float32") == 0
