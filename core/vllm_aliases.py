"""The four gauges by which gateways that know vLLM pick an endpoint, under vLLM's names.

Source: the model server protocol of the Gateway API inference extension, which reads a queue's
length, the share of KV cache in use and the cache's size under these names by default.
"""

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from core.messages import WorkerLoad


class VllmAliases:
    """Register in a ``CollectorRegistry``; what they tell is ``load()`` at each scrape."""

    def __init__(self, model: str, load: Callable[[], WorkerLoad], *, block_size: int) -> None:
        self._model = model
        self._load = load
        self._block_size = block_size

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges' values now."""
        load = self._load()
        in_use = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the batch", load.running),
            ("vllm:num_requests_waiting", "Requests that wait for their turn", load.waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", in_use),
        ):
            family = GaugeMetricFamily(name, text, labels=("model_name",))
            family.add_metric((self._model,), value)
            yield family
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "Size of the cache", labels=("block_size", "num_gpu_blocks")
        )
        cache.add_metric((str(self._block_size), str(load.total_blocks)), 1)
        yield cache


def total_load(loads: Iterable[WorkerLoad], *, num_waiting: int) -> WorkerLoad:
    """Return the load of several workers as of one, with ``num_waiting`` requests before them."""
    total = WorkerLoad(waiting=num_waiting)
    for load in loads:
        total = WorkerLoad(
            running=total.running + load.running,
            waiting=total.waiting + load.waiting,
            queued_tokens=total.queued_tokens + load.queued_tokens,
            free_blocks=total.free_blocks + load.free_blocks,
            total_blocks=total.total_blocks + load.total_blocks,
        )
    return total
