"""Exported numbers must be the manager's own: a gauge kept beside it drifts from the truth."""

from prometheus_client import CollectorRegistry

from blockmgr.metrics import BlockCollector
from blockmgr.states import BlockState
from tests.blockmgr.conftest import MakeManager
from tests.blockmgr.words import admit_with_hit, owner_of


def test_i1_exported_states_sum_to_the_pool_and_counters_follow(make_manager: MakeManager) -> None:
    blocks = make_manager(10)
    registry = CollectorRegistry()
    registry.register(BlockCollector(blocks, role="decode"))
    admit_with_hit(blocks, "R", range(33))
    step = blocks.dispatch_step([owner_of("R")])
    blocks.settle(owner_of("R"), 33)
    admit_with_hit(blocks, "S", range(33))
    blocks.release(owner_of("R"))

    labels = {"role": "decode", "tier": "device"}
    by_state = {
        state: registry.get_sample_value(
            "sluice_kv_blocks", {**labels, "state": state.name.lower()}
        )
        for state in BlockState
    }
    assert by_state == blocks.counts()
    assert by_state[BlockState.FENCED] == 1
    for name, value in (
        ("sluice_kv_block_allocations_total", 4),
        ("sluice_kv_deferred_releases_total", 1),
        ("sluice_prefix_cache_query_tokens_total", 64),
        ("sluice_prefix_cache_hit_tokens_total", 32),
    ):
        assert registry.get_sample_value(name, labels) == value, name
    blocks.complete_step(step)
