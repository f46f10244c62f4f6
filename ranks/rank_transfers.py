"""What moves bytes in one rank, leader or follower, into or out of its own pool."""

from collections.abc import Callable, Hashable

from core.config import TransferConfig
from core.errors import InternalError
from core.ids import Incarnation, OperationId
from core.messages import PoolEndpoint
from core.messages.base import Role
from engine.kv_conversion import KVConverter
from engine.startup import Engine
from transfer.pump import Pump
from transfer.rank_reads import RankReads
from transfer.reads import ReadEnd
from transfer.stats import TransferStats
from transfer.transport import ReadOutcome, Transport
from transfer.transports import open_transport


def staging_nbytes(config: TransferConfig, role: Role) -> int:
    """Return the room that a rank of ``role`` needs for KV that comes in another shape."""
    return config.staging_mib * 2**20 if role == "decode" else 0


def open_rank_reads(
    engine: Engine,
    config: TransferConfig,
    *,
    incarnation: Incarnation,
    stats: TransferStats,
    on_end: Callable[[ReadEnd], None],
    on_begun: Callable[[OperationId], None] = lambda _: None,
) -> RankReads:
    """Return what carries reads into this rank's pool out, on the running loop.

    Raises:
        ConfigError: the transport cannot be used, or does not take the pool.
    """
    return RankReads(
        _open_transport(engine, config, incarnation),
        compatibility=engine.compatibility,
        rank=engine.rank,
        scratch_offset=engine.pool.nbytes,
        config=config,
        stats=stats,
        on_end=on_end,
        on_begun=on_begun,
        converter=KVConverter(engine.pool) if engine.pool.staging_range else None,
    )


class RankSource:
    """This rank's pool as others read it, on the running loop."""

    def __init__(self, engine: Engine, config: TransferConfig, *, incarnation: Incarnation) -> None:
        self._transport = _open_transport(engine, config, incarnation)
        self._pump = Pump(
            self._transport, interval_s=config.pump_interval_s, on_outcome=_refuse_outcome
        )

    @property
    def transport(self) -> str:
        """Name of what moves the bytes."""
        return self._transport.name

    def endpoint(self) -> PoolEndpoint:
        """Return what a reader needs."""
        return self._transport.endpoint()

    def serve(self, reader: Hashable, *, active: bool) -> None:
        """See ``Pump.serve``."""
        self._pump.serve(reader, active=active)

    def close(self) -> None:
        """Serve nobody any more."""
        self._pump.close()
        self._transport.close()


def _open_transport(engine: Engine, config: TransferConfig, incarnation: Incarnation) -> Transport:
    # Ranks of one worker are different processes: no two may have one name.
    name = incarnation if engine.rank == 0 else Incarnation(f"{incarnation}.{engine.rank}")
    transport = open_transport(config.transport, name)
    transport.register(
        engine.pool.address,
        engine.pool.registered_nbytes,
        memory="cuda" if engine.pool.blocks.is_cuda else "host",
    )
    return transport


def _refuse_outcome(outcome: ReadOutcome) -> None:
    """A source posts no reads."""
    raise InternalError(f"a source got the outcome of read {outcome.read}")
