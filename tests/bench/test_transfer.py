"""The ratios of ``bench.transfer`` mean what they say, and both sides of a case read the same."""

import itertools

import pytest

from bench.transfer import Results, ratios_of
from bench.transfer_direct import SharedCopy
from bench.transfer_memory import CASES, POOL_NBYTES, Case, allocate, fill, open_shared, share
from bench.transfer_ours import layout_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_names_each_block_once_and_stays_in_the_pool(case: Case) -> None:
    for turn in (0, 1, 7, 10_000):
        rows = case.rows(turn)
        assert rows[:, 2].sum() == case.nbytes
        assert len(rows) == (1 if case.placement == "contiguous" else case.num_blocks)
        for side in (0, 1):
            starts = sorted(rows[:, side].tolist())
            assert all(b - a > case.block_nbytes for a, b in itertools.pairwise(starts))
            assert starts[-1] + rows[0, 2] <= POOL_NBYTES
    assert layout_of(case.block_nbytes).block_nbytes == case.block_nbytes


def test_turns_go_through_the_pool() -> None:
    firsts = {int(CASES[2].rows(turn)[0, 0]) for turn in range(100)}
    assert len(firsts) == 100


def test_the_copy_reads_what_another_mapping_of_the_memory_has() -> None:
    path, shared = share()
    fill(open_shared(path)[: 4 * 2**20])
    pool = allocate(POOL_NBYTES)
    SharedCopy(pool, shared).read(CASES[1].rows(0))
    for local, remote, nbytes in CASES[1].rows(0).tolist():
        assert (pool[local : local + nbytes] == shared[remote : remote + nbytes]).all()
    assert pool.any()


def test_a_ratio_is_one_where_the_aim_is_just_met() -> None:
    results = Results()
    large, small = CASES[2], CASES[0]
    results.seconds["shared memory"] = {
        case.name: {"copy": 0.9, "ucx direct": 2.0, "ucx": 1.0} for case in (large, small)
    } | {case.name: {} for case in CASES if case not in (large, small)}
    results.figures = {"ucx request us": 50.0, "ucx idle share": 0.0}
    found = ratios_of(results)
    assert found.pop(next(name for name in found if large.name in name)) == 1.0
    assert found.pop("software of one request, at most 100 us") == 2.0
    assert found.pop("CPU of an idle pair, none") == 1000.0
    assert found == {}, "nothing is guessed of what is missing, and small requests have no aim"
