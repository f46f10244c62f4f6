"""From a worker's parts to a receiver over its pool."""

from functools import partial

from blockmgr.block_manager import BlockManager
from core.ids import BlockId, Incarnation
from core.messages import Hello
from core.worker_context import WorkerContext
from core.worker_metrics import WorkerMetrics
from decode.delivery import ReceiverOwner
from decode.landing import Memory
from decode.receiver import Receiver
from decode.scheduler import DecodeScheduler
from decode.sources import Sources
from decode.tracing import DecodeTrace
from ranks.leader import Ranks
from transfer.extents import LayerSpan
from transfer.metrics import REGISTERED_BYTES
from transfer.reader import Reader


def open_receiver(
    context: WorkerContext,
    ranks: Ranks,
    *,
    incarnation: Incarnation,
    blocks: BlockManager,
    scheduler: DecodeScheduler,
    owner: ReceiverOwner,
    metrics: WorkerMetrics,
    trace: DecodeTrace,
) -> Receiver:
    """Return what receives KV into the pools of ``ranks``, and export what it holds.

    Raises:
        ConfigError: the transport cannot be used.
    """
    config, engine = context.config, ranks.engine
    pool = engine.pool
    limit = int(config.cache.quarantine_fraction * pool.num_blocks)
    metrics.gauge(
        "sluice_kv_quarantine_limit_blocks",
        "Blocks that reads without an owner may hold before an endpoint is torn down",
        lambda: limit,
    )
    metrics.gauge("sluice_kv_registered_bytes", REGISTERED_BYTES, lambda: pool.registered_nbytes)
    reader = Reader(layout=engine.layout, config=config.transfer, max_quarantined_blocks=limit)
    hello = Hello(
        name=context.worker_id, incarnation=incarnation, compatibility=engine.compatibility
    )

    def digests_of(block_ids: list[BlockId], span: LayerSpan) -> tuple[bytes, ...]:
        return pool.digests(block_ids, offset=span.offset, nbytes=span.nbytes)

    return Receiver(
        reader=reader,
        compatibility=engine.compatibility,
        open_reads=partial(ranks.open_reads, reader.stats),
        open_sources=lambda receiver: Sources(context.keys, hello, receiver),
        memory=Memory(blocks, scheduler, digests_of),
        owner=owner,
        registry=metrics.registry,
        trace=trace,
    )
