"""Every request that fits is served in the end, and nothing stands still on the way.

Two pools that wait for each other, a preempted sequence that nobody admits again, a ticket that no
event looks at: each is a request that hangs until a timeout although nothing is broken. All parts
are the real state machines; only time, sockets and the device are virtual.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import pytest

from blockmgr.receive_target import ReceiveTarget
from core.config import SchedulerConfig
from core.errors import OutOfBlocksError
from core.ids import BlockId, Generation, OperationId, Owner
from decode.scheduler import DecodeScheduler
from decode.sequence_table import SequenceTable
from prefill.prompt import Prompt
from tests.property.fleet import Fleet, Plan

PATIENCE_S = 25.0
"""Virtual. Every single thing takes less than 2 s; the timeouts that would end a stall take 30."""


def plan(seed: int, load_failure: Literal["recompute", "fail"] = "fail") -> Plan:
    """Fleets and pools of many sizes; the smallest pools hold one long request."""
    return Plan(
        num_requests=40,
        num_blocks=17 + seed % 8,
        num_prefill=1 + seed % 3,
        num_decode=1 + seed % 2,
        num_kills=seed // 3 % 3,
        num_slots=(0, 0, 12, 40)[seed % 4],
        load_failure=load_failure,
        layer_ranges=(4, 2, 3, 1)[seed % 4],
        scheduler=SchedulerConfig(
            max_num_seqs=4 if seed % 2 else 8,
            max_batch_tokens=8 + seed % 9,
            overlap_depth=1 + seed % 3,
            reserve_blocks_min=seed % 2,
        ),
    )


def serve(seed: int, load_failure: Literal["recompute", "fail"] = "fail") -> Fleet:
    fleet = Fleet(seed, plan(seed, load_failure))
    fleet.run(patience=PATIENCE_S)
    fleet.check_all_free()
    return fleet


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_j05_every_request_that_fits_is_served(first: int) -> None:
    fleets = [serve(seed) for seed in range(first, first + 10)]

    # What is to be survived must have happened
    assert sum(fleet.num_preemptions for fleet in fleets) > 5
    assert sum(fleet.num_killed for fleet in fleets) > 2
    assert sum(fleet.num_lost for fleet in fleets) > 5
    assert sum(fleet.num_copies for fleet in fleets) > 100
    assert sum(fleet.num_early_tickets for fleet in fleets) > 100


def test_j05_c23_requests_whose_kv_does_not_come_are_served_where_they_are() -> None:
    fleets = [serve(seed, "recompute") for seed in range(100, 112)]
    assert sum(fleet.num_recomputed for fleet in fleets) > 5
    assert sum(fleet.num_lost for fleet in fleets) == 0


@pytest.mark.parametrize("prefill_block_size", [1, 2, 8, 12])
def test_j05_requests_are_served_where_blocks_differ_in_size(prefill_block_size: int) -> None:
    """A block here may take several tickets, a ticket's block several here: both are promised."""
    fleets: list[Fleet] = []
    for seed in range(200, 208):
        shaped = replace(plan(seed), prefill_block_size=prefill_block_size, num_slots=0)
        fleets.append(Fleet(seed, shaped))
        fleets[-1].run(patience=PATIENCE_S)
        fleets[-1].check_all_free()
    assert sum(fleet.num_early_tickets for fleet in fleets) > 10
    assert sum(fleet.num_killed for fleet in fleets) > 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_j04_j05_a_thousand_fleets_with_kills_and_aborts() -> None:
    for seed in range(1000, 2000):
        serve(seed)


# The rules switched off: the fleet must stall


def count_stalls(seeds: Iterable[int]) -> int:
    stalls = 0
    for seed in seeds:
        try:
            serve(seed)
        except AssertionError as error:
            stalls += "stalled since" in str(error)
    return stalls


def test_j05_a_fleet_that_pins_prefixes_out_of_order_stalls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SequenceTable, "has_unpromised_remote", property(lambda _: False))
    assert count_stalls(range(12)) > 0


def test_j05_a_fleet_that_passes_prompts_with_pinned_prefixes_stalls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = (99, 123, 651)
    assert not count_stalls(seeds)
    monkeypatch.setattr(Prompt, "is_pinned_at_reader", property(lambda _: False))
    assert count_stalls(seeds) > 0


def test_j05_a_fleet_that_takes_pieces_without_a_promise_stalls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def receive(
        self: DecodeScheduler,
        owner: Owner,
        targets: Iterable[ReceiveTarget],
        operation: OperationId,
    ) -> list[list[tuple[BlockId, Generation]]] | None:
        self._budget.promise(self._table[owner], 0)
        try:
            return self._blocks.begin_receive(owner, list(targets), operation)
        except OutOfBlocksError:
            return None

    monkeypatch.setattr(DecodeScheduler, "receive", receive)
    assert count_stalls((89, 100, 113, 128)) > 0


def test_j05_a_fleet_that_never_closes_a_promise_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockmgr.admission.Admission.close", lambda *_: None)
    assert count_stalls(range(4)) > 0
