"""What a config names that may not be there: keys, a transport, enough KV heads for its ranks.

What is on this machine says nothing certain about others; only what the model's folder says does.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from core.channel_keys import PARTIES
from core.config import SluiceConfig
from core.config_faults import Fault
from core.errors import ConfigError
from core.key_files import load_keys
from core.kv_heads import heads_of_rank
from core.messages import Party


def unlike_ranks(config: SluiceConfig) -> Iterator[Fault]:
    """Yield what roles have ranks that the KV heads of a model on this machine do not fit."""
    for role, count in config.deploy.counts.items():
        own = config.for_role(role)
        num_kv_heads = _num_kv_heads(Path(own.model.model).expanduser())
        if not count or num_kv_heads is None:
            continue
        try:
            heads_of_rank(num_kv_heads, rank=0, num_ranks=own.engine.tensor_parallel_size)
        except ConfigError as error:
            place = ("engine", "tensor_parallel_size")
            yield Fault(((role, *place), place), f"{role} workers", f"engine.{error}")


def missing_here(config: SluiceConfig) -> Iterator[Fault]:
    """Yield what is not on this machine, and has to be where workers start."""
    if config.security.keys_dir is not None:
        try:
            _load_keys(config.security.keys_dir)
        except (ConfigError, OSError) as error:
            yield Fault((("security", "keys_dir"),), "on this machine", str(error))
    name = config.for_role("decode").transfer.transport
    if name in {"nixl", "ucxx"} and find_spec(name) is None:
        yield Fault(
            (("decode", "transfer", "transport"), ("transfer", "transport")),
            "transfer.transport",
            f"{name} does not load on this machine; pip install {name}-cu12, or give auto",
        )


def _load_keys(folder: Path) -> None:
    """Load the secrets that are here: a machine needs those of its own processes only."""
    here: list[Party] = [party for party in PARTIES if (folder / f"{party}.key").exists()]
    for party in here or PARTIES:
        load_keys(folder, party)


def _num_kv_heads(folder: Path) -> int | None:
    """Return what the model's config says; None: it does not, or is not here."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        content = cast("dict[str, Any]", json.loads((folder / "config.json").read_bytes()))
        text = content.get("text_config", content)
        number = text.get("num_key_value_heads", text.get("num_attention_heads"))
        return number if isinstance(number, int) and number > 0 else None
    return None
