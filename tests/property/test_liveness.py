"""Every request that fits is served in the end, and nothing stands still on the way.

Two pools that wait for each other, a preempted sequence that nobody admits again, a ticket that no
event looks at: each is a request that hangs until a timeout although nothing is broken. All parts
are the real state machines; only time, sockets and the device are virtual.
"""

import pytest

from core.config import SchedulerConfig
from tests.property.fleet import Fleet, Plan

PATIENCE_S = 25.0
"""Virtual. Every single thing takes less than 2 s; the timeouts that would end a stall take 30."""


@pytest.mark.parametrize("seed", range(30))
def test_j05_every_request_that_fits_is_served(seed: int) -> None:
    fleet = Fleet(seed, Plan())
    fleet.run(patience=PATIENCE_S)
    fleet.check_all_free()


@pytest.mark.parametrize("seed", range(30))
def test_j05_tiny_pools_and_bursts(seed: int) -> None:
    scheduler = SchedulerConfig(max_num_seqs=4, max_batch_tokens=8, overlap_depth=1 + seed % 3)
    fleet = Fleet(seed, Plan(num_requests=40, num_blocks=18, scheduler=scheduler))
    fleet.run(patience=PATIENCE_S)
    fleet.check_all_free()
