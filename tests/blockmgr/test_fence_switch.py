"""Where no fence is needed, nothing may differ from releasing at once; where one is, it must be on.

A gate that is wrong in one direction is a race, in the other it withholds memory for nothing.
"""

import pytest

from blockmgr.fences import KVWriters, fences_needed
from core.errors import InvalidTransitionError
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import (
    admit_new,
    ids_of,
    num_free,
)


@pytest.mark.parametrize(
    ("depth", "writers", "has_loading_tier", "needed"),
    [
        (1, KVWriters.NONE, False, False),
        (1, KVWriters.CONSUMER, False, False),
        (1, KVWriters.BOTH, True, False),
        (2, KVWriters.NONE, False, False),
        (2, KVWriters.NONE, True, True),
        (2, KVWriters.PRODUCER, False, False),
        (2, KVWriters.PRODUCER, True, True),
        (2, KVWriters.CONSUMER, False, True),
        (2, KVWriters.BOTH, False, True),
        (4, KVWriters.CONSUMER, True, True),
    ],
)
def test_a17_truth_table(
    depth: int, writers: KVWriters, *, has_loading_tier: bool, needed: bool
) -> None:
    assert fences_needed(depth, writers, has_loading_tier=has_loading_tier) is needed


def test_a17_without_fences_blocks_move_as_if_nothing_were_in_flight(
    make_manager: MakeManager,
) -> None:
    def allocated(*, fences: bool, overlap: bool) -> list[list[int]]:
        blocks = make_manager(6, fences=fences)
        tables: list[list[int]] = []
        for index in range(5):
            owner = admit_new(blocks, f"R{index}", 40)
            tables.append(ids_of(blocks, owner))
            step = blocks.dispatch_step([owner])
            if not overlap:
                blocks.complete_step(step)
            blocks.release(owner)
            assert blocks.num_withheld == 0
        return tables

    immediate = allocated(fences=True, overlap=False)
    assert allocated(fences=False, overlap=True) == immediate
    assert allocated(fences=False, overlap=False) == immediate


def test_a17_fences_switch_only_while_no_step_is_in_flight(make_manager: MakeManager) -> None:
    blocks = make_manager(10, fences=False)
    owner = admit_new(blocks, "R", 33)
    step = blocks.dispatch_step([owner])
    with pytest.raises(InvalidTransitionError):
        blocks.switch_fences(enabled=True)

    blocks.complete_step(step)
    blocks.switch_fences(enabled=True)
    step = blocks.dispatch_step([owner])
    blocks.release(owner)

    assert num_free(blocks) == 7
    blocks.complete_step(step)
