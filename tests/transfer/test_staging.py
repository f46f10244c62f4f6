"""Two reads that were staged in one place would unpack each other's bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InternalError
from transfer.staging import ALIGNMENT, Staging


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3)), max_size=40))
def test_pieces_never_overlap_and_nothing_is_lost(calls: list[tuple[int, int]]) -> None:
    staging = Staging(range(4096, 4096 + 20 * ALIGNMENT))
    held: dict[int, int] = {}
    for nbytes, num_returns in calls:
        offset = staging.take(nbytes)
        if offset is not None:
            assert offset % ALIGNMENT == 0
            assert all(offset + nbytes <= at or at + size <= offset for at, size in held.items())
            held[offset] = nbytes
        for at in list(held)[:num_returns]:
            staging.give_back(at)
            del held[at]
        staging.check_invariants()
    for at in held:
        staging.give_back(at)
    staging.check_invariants()
    assert staging.is_unused
    assert staging.take(20 * ALIGNMENT) == 4096


def test_a_second_return_is_refused() -> None:
    staging = Staging(range(4 * ALIGNMENT))
    offset = staging.take(10)
    assert offset is not None
    staging.give_back(offset)
    with pytest.raises(InternalError, match="twice"):
        staging.give_back(offset)
    staging.check_invariants()


def test_no_room_takes_nothing() -> None:
    staging = Staging(range(2 * ALIGNMENT))
    assert staging.take(3 * ALIGNMENT) is None
    assert Staging(range(0)).take(1) is None
    assert staging.is_unused
