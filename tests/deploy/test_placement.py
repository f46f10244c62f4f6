"""Each service asks Ray for room that exists: on this machine, and on clusters of other shapes."""

import pytest

from core.config import SluiceConfig
from core.errors import ConfigError
from deploy.supervision.placement import router_bundle, worker_bundle


def config(**sections: dict[str, object]) -> SluiceConfig:
    return SluiceConfig.parse(dict(sections), source="test")


def test_a_private_session_counts_no_cpus_so_that_it_can_be_scaled() -> None:
    assert router_bundle(private=True, driver_host="127.0.0.1").num_cpus == 0.0
    bundle = worker_bundle(config(engine={"num_threads": 8}), private=True, num_gpus=0)
    assert bundle.num_cpus == 0.0


def test_on_a_cluster_the_router_stays_beside_the_driver_and_takes_no_cpu() -> None:
    bundle = router_bundle(private=False, driver_host="10.0.0.5")
    assert set(bundle.resources) == {"node:10.0.0.5"}
    assert bundle.num_cpus == 0.0


@pytest.mark.parametrize(("num_threads", "cpus"), [(0, 1.0), (6, 6.0)])
def test_on_a_cluster_a_worker_asks_for_its_threads(num_threads: int, cpus: float) -> None:
    bundle = worker_bundle(config(engine={"num_threads": num_threads}), private=False, num_gpus=0)
    assert bundle.num_cpus == cpus


@pytest.mark.parametrize(
    ("num_gpus", "private", "share"), [(4, True, 1.0), (1, True, 0.33), (1, False, 1.0)]
)
def test_workers_share_the_gpus_of_one_machine_only_where_there_are_too_few(
    num_gpus: int, *, private: bool, share: float
) -> None:
    three_workers = config(deploy={"prefill": 1, "decode": 2})
    bundle = worker_bundle(three_workers, private=private, num_gpus=num_gpus)
    assert bundle.num_gpus == pytest.approx(share)


def test_each_rank_of_a_worker_gets_a_core_and_a_gpu_of_its_own() -> None:
    """In one bundle, because the ranks of a worker run on one node."""
    two_ranks = config(engine={"tensor_parallel_size": 2})
    bundle = worker_bundle(two_ranks, private=False, num_gpus=8)
    assert (bundle.num_cpus, bundle.num_gpus) == (2.0, 2.0)
    many_threads = config(engine={"tensor_parallel_size": 2, "num_threads": 6})
    assert worker_bundle(many_threads, private=False, num_gpus=0).num_cpus == 6.0


def test_ranks_do_not_share_a_gpu() -> None:
    two_ranks = config(engine={"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: Ray sees 1 GPUs"):
        worker_bundle(two_ranks, private=True, num_gpus=1)


def test_cpu_workers_leave_the_gpus_alone() -> None:
    bundle = worker_bundle(config(model={"device": "cpu"}), private=True, num_gpus=8)
    assert bundle.num_gpus == 0.0


def test_cuda_without_a_gpu_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no GPU"):
        worker_bundle(config(model={"device": "cuda"}), private=True, num_gpus=0)
