"""Which room each service of a deployment asks Ray for. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from core.config import SluiceConfig
from core.errors import ConfigError

ROUTER_NODE_SHARE = 0.001
"""Of the driver's node: a mark that places the router there, not an amount."""
GPU_SHARE_STEP = 0.01


@dataclass(frozen=True, slots=True)
class Bundle:
    """The resources of one service."""

    resources: Mapping[str, float]

    @property
    def num_cpus(self) -> float:
        """For the actor's own request."""
        return self.resources.get("CPU", 0.0)

    @property
    def num_gpus(self) -> float:
        """For the actor's own request."""
        return self.resources.get("GPU", 0.0)

    @property
    def custom(self) -> dict[str, float]:
        """All others."""
        return {k: v for k, v in self.resources.items() if k not in {"CPU", "GPU"}}

    def with_custom(self, custom: Mapping[str, float]) -> "Bundle":
        """Return this room and ``custom`` beside it."""
        return Bundle({**self.resources, **custom})


def router_bundle(*, private: bool, driver_host: str) -> Bundle:
    """Place the router beside the driver, whose address clients know."""
    if private:
        return Bundle({})
    # Many clusters' head nodes offer no CPU to actors, so none is asked for.
    return Bundle({f"node:{driver_host}": ROUTER_NODE_SHARE})


def worker_bundle(config: SluiceConfig, *, private: bool, num_gpus: float) -> Bundle:
    """Return one prefill or decode worker's room.

    A private session counts no CPUs, so that it can be scaled. On a cluster a worker asks for
    its threads, of which each rank has one at least. Each rank gets a GPU of its own, all on one
    node; a worker of one rank gets an equal share where there are too few on this machine.

    Raises:
        ConfigError: the config demands CUDA, and there is none, or fewer than one worker's ranks.
    """
    num_ranks = config.engine.tensor_parallel_size
    cpus = 0.0 if private else float(max(config.engine.num_threads, num_ranks))
    if config.model.device == "cpu" or num_gpus == 0:
        if config.model.device == "cuda":
            raise ConfigError("model.device: cuda, but Ray sees no GPU; use device: cpu or auto")
        return Bundle({"CPU": cpus})
    if num_ranks > 1:
        if num_gpus < num_ranks:
            raise ConfigError(
                f"engine.tensor_parallel_size={num_ranks}: Ray sees {num_gpus:g} GPUs, and each "
                "rank needs one of its own; lower it, or use model.device: cpu"
            )
        return Bundle({"CPU": cpus, "GPU": float(num_ranks)})
    num_workers = config.deploy.prefill + config.deploy.decode
    share = 1.0
    if private and num_gpus < num_workers:
        share = num_gpus / num_workers // GPU_SHARE_STEP * GPU_SHARE_STEP
    return Bundle({"CPU": cpus, "GPU": share})
