"""Two ranks on one accelerator would share its memory, and NCCL refuses them."""

import pytest

from ranks.devices import visible_device


@pytest.mark.parametrize(
    ("leader_sees", "rank", "seen"),
    [
        (None, 1, "1"),
        ("3,5", 0, "3"),
        ("3, 5", 1, "5"),
        ("GPU-aa,GPU-bb", 1, "GPU-bb"),
        ("3", 1, ""),
        ("", 1, ""),
    ],
)
def test_each_rank_sees_its_own_device(leader_sees: str | None, rank: int, seen: str) -> None:
    assert visible_device(leader_sees, rank) == seen
