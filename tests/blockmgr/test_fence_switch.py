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
    ("meets_steps", "writers", "has_loading_tier", "needed"),
    [
        (False, KVWriters.NONE, False, False),
        (False, KVWriters.CONSUMER, False, False),
        (False, KVWriters.BOTH, True, False),
        (True, KVWriters.NONE, False, False),
        (True, KVWriters.NONE, True, True),
        (True, KVWriters.PRODUCER, False, False),
        (True, KVWriters.PRODUCER, True, True),
        (True, KVWriters.CONSUMER, False, True),
        (True, KVWriters.BOTH, False, True),
        (True, KVWriters.CONSUMER, True, True),
        (True, KVWriters.BOTH, True, True),
    ],
)
def test_a17_truth_table(
    writers: KVWriters, *, meets_steps: bool, has_loading_tier: bool, needed: bool
) -> None:
    """Depth 1 is a release that meets no step, where no message is taken while one runs."""
    assert (
        fences_needed(writers, releases_meet_steps=meets_steps, has_loading_tier=has_loading_tier)
        is needed
    )


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
