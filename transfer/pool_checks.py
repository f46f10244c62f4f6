"""What every transport refuses about pools, in the same words."""

from core.errors import ConfigError, HandshakeError
from core.ids import Incarnation
from core.messages import PoolEndpoint
from transfer.descriptors import Pool


def require_new_pool(name: str, registered: Pool | None, address: int, nbytes: int) -> None:
    """Refuse a second pool of one transport, and one that is nowhere.

    Raises:
        ConfigError: transport ``name`` has ``registered`` a pool, or this is none.
    """
    if registered is not None:
        raise ConfigError(f"transport {name}: a pool is already registered")
    if address <= 0 or nbytes <= 0:
        raise ConfigError(f"transport {name}: no pool at address={address} nbytes={nbytes}")


def require_same_transport(name: str, peer: Incarnation, endpoint: PoolEndpoint) -> None:
    """Refuse a peer whose pool another kind of transport serves.

    Raises:
        HandshakeError: ``endpoint`` is not one of transport ``name``.
    """
    if endpoint.transport != name:
        raise HandshakeError(
            f"peers cannot exchange KV: transfer.transport: decode {name!r}, prefill {peer} "
            f"{endpoint.transport!r} (set transfer.transport to one value on both; auto takes "
            "what loads on each machine)"
        )
