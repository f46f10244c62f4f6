"""What a worker of several ranks does not do, said at its start."""

from core.config import SluiceConfig
from core.errors import ConfigError


def check_limits(config: SluiceConfig) -> None:
    """Return if a worker of more than one rank can do what ``config`` asks of it.

    Raises:
        ConfigError: it cannot; names every such field, its value and the fix.
    """
    if config.engine.tensor_parallel_size == 1:
        return
    head_window = config.kv_groups.head_window
    asked = {
        f"cache.host_tier_gib={config.cache.host_tier_gib}": config.cache.host_tier_gib > 0,
        "cache.poison=True": config.cache.poison,
        "transfer.checksums=True": config.transfer.checksums,
        "kv_groups.head_window": head_window is not None and head_window.ratio != 0,
    }
    if refused := [field for field, is_asked in asked.items() if is_asked]:
        raise ConfigError(
            f"engine.tensor_parallel_size={config.engine.tensor_parallel_size}: the leader alone "
            f"sees its own pool, so this cannot be had beside it: {', '.join(refused)}; leave it "
            "out, or set tensor_parallel_size: 1"
        )
