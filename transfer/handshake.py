"""May these two exchange KV? Decided before any byte moves."""

from collections.abc import Iterator

import msgspec

from core.errors import HandshakeError
from core.messages import Compatibility

_FIXES = {
    "model_fingerprint": "serve the same model folder and revision on both",
    "tokenizer_fingerprint": "serve the same tokenizer files on both",
    "kv_layout.groups": "serve the same model with the same kv_groups on both",
    "kv_layout.block_size": "set cache.block_size to one value",
    "total_kv_heads": "serve the same model on both",
    "kv_layout.num_kv_heads": "serve the same model with the same tensor parallelism on both",
    "kv_layout.head_dim": "serve the same model on both",
    "kv_layout.dtype": "set model.dtype to one value",
    "tensor_parallel_size": "use one tensor-parallel size",
}


def check_compatible(mine: Compatibility, theirs: Compatibility) -> None:
    """Return if KV of one side means the same on the other, and both know every safety feature.

    Raises:
        HandshakeError: they do not. Names each differing field, both values and the fix.
    """
    differences = [
        f"{name}: here {here!r}, there {there!r} ({_FIXES[name]})"
        for name, here, there in _fields(mine, theirs)
        if here != there
    ]
    missing = sorted(set(mine.features) - set(theirs.features))
    if missing:
        differences.append(
            f"features: the peer lacks {', '.join(missing)} (run one Sluice version on both)"
        )
    unknown = sorted(set(theirs.features) - set(mine.features))
    if unknown:
        differences.append(
            f"features: the peer relies on {', '.join(unknown)} (run one Sluice version on both)"
        )
    if differences:
        raise HandshakeError("peers cannot exchange KV: " + "; ".join(differences))


def _fields(mine: Compatibility, theirs: Compatibility) -> Iterator[tuple[str, object, object]]:
    """Yield (name, my value, their value) of every field that must be equal."""
    for name in msgspec.structs.fields(Compatibility):
        if name.name in {"features", "kv_layout"}:
            continue
        yield name.name, getattr(mine, name.name), getattr(theirs, name.name)
    for name in msgspec.structs.fields(type(mine.kv_layout)):
        here, there = getattr(mine.kv_layout, name.name), getattr(theirs.kv_layout, name.name)
        yield f"kv_layout.{name.name}", here, there
