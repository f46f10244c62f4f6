"""The ratios of ``bench.transfer`` mean what they say, and both sides of a case read the same."""

import itertools

import pytest

from bench.transfer import Results, ratios_of
from bench.transfer_direct import SharedCopy
from bench.transfer_memory import CASES, POOL_NBYTES, Case, allocate, fill, open_shared, share
from bench.transfer_ours import layout_of
from bench.transfer_pairs import Side, take_turns


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


class Told:
    """A source that only remembers what it was asked."""

    def __init__(self, events: list[str], name: str) -> None:
        self._events, self._name = events, name

    def ask(self, command: str) -> str:
        self._events.append(f"{self._name} {command}")
        return command


def test_all_sides_of_a_case_take_turns_while_only_their_own_source_works() -> None:
    events: list[str] = []

    def reads(name: str) -> float:
        events.append(name)
        return 1.0 + len(events)

    sides = {
        "ucx": Side(lambda: reads("ucx"), Told(events, "source")),
        "nixl direct": Side(lambda: reads("nixl direct"), Told(events, "other"), "spin"),
        "copy": Side(lambda: reads("copy")),
    }
    found = take_turns(sides, 2, lambda name, error: pytest.fail(f"{name}: {error}"))
    one_round = ["source serve", "ucx", "source idle"]
    one_round += ["other spin", "nixl direct", "other idle", "copy"]
    assert events == one_round * 3
    # The first round is not counted: what is left are the second's and the third's times.
    assert found == {"ucx": 13.5, "nixl direct": 16.5, "copy": 18.5}


def test_a_side_that_fails_is_missing_and_the_others_go_on() -> None:
    told: list[str] = []

    def fail() -> float:
        raise RuntimeError("its source has ended")

    sides = {"nixl": Side(fail), "copy": Side(lambda: 1.0)}
    found = take_turns(sides, 3, lambda name, error: told.append(f"{name}: {error}"))
    assert (found, told) == ({"copy": 1.0}, ["nixl: its source has ended"])


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
