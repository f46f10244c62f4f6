"""May these two exchange KV? Decided before any byte moves, and before any address is told."""

from collections.abc import Iterator
from typing import NamedTuple

from core.errors import ConfigError, HandshakeError
from core.kv_heads import heads_of_rank
from core.messages import Compatibility


class _Difference(NamedTuple):
    """A field that stands between two workers."""

    field: str
    decode: object
    prefill: object
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: decode {self.decode!r}, prefill {self.prefill!r} ({self.fix})"


def check_compatible(reader: Compatibility, source: Compatibility) -> None:
    """Return if KV of ``source`` can become KV of ``reader``, and both know every safety feature.

    What may differ is what ``transfer.pairing`` can bridge: the block size, the ranks, and the
    KV dtype where decode keeps float8. Both sides ask this, and so refuse alike.

    Raises:
        HandshakeError: they cannot. Names each differing field, both values and the fix.
    """
    differences = [
        *map(str, _different_models(reader, source)),
        *map(str, _different_blocks(reader, source)),
        *_odd_ranks(reader, "decode"),
        *_odd_ranks(source, "prefill"),
        *_different_features(reader, source),
    ]
    if differences:
        raise HandshakeError("peers cannot exchange KV: " + "; ".join(differences))


def _different_models(reader: Compatibility, source: Compatibility) -> Iterator[_Difference]:
    """Yield what must be equal."""
    here, there = reader.kv_layout, source.kv_layout
    for field, mine, theirs, fix in (
        (
            "model_fingerprint",
            reader.model_fingerprint,
            source.model_fingerprint,
            "serve the same model folder and revision on both",
        ),
        (
            "tokenizer_fingerprint",
            reader.tokenizer_fingerprint,
            source.tokenizer_fingerprint,
            "serve the same tokenizer files on both",
        ),
        (
            "total_kv_heads",
            reader.total_kv_heads,
            source.total_kv_heads,
            "serve the same model on both",
        ),
        (
            "model_dtype",
            reader.model_dtype,
            source.model_dtype,
            "set model.dtype to one value",
        ),
        ("kv_layout.head_dim", here.head_dim, there.head_dim, "serve the same model on both"),
        (
            "kv_layout.groups",
            here.groups,
            there.groups,
            "serve the same model with the same kv_groups on both",
        ),
    ):
        if mine != theirs:
            yield _Difference(field, mine, theirs, fix)


def _different_blocks(reader: Compatibility, source: Compatibility) -> Iterator[_Difference]:
    """Yield what may differ, but not in every way."""
    here, there = reader.kv_layout, source.kv_layout
    sizes = (here.block_size, there.block_size)
    if min(sizes) < 1 or max(sizes) % min(sizes):
        yield _Difference(
            "kv_layout.block_size", *sizes, "let one cache.block_size be a multiple of the other"
        )
    elif sizes[0] > sizes[1] and any(group.window is not None for group in here.groups):
        # Prefill has freed what a window left behind by blocks of its own: a larger block of
        # decode would begin with tokens that nobody has any more.
        yield _Difference(
            "kv_layout.block_size",
            *sizes,
            "a model with sliding windows: set decode's cache.block_size to at most prefill's",
        )
    if here.dtype != there.dtype and not (
        here.dtype == "float8_e4m3" and there.dtype == reader.model_dtype
    ):
        fix = (
            "set decode's cache.kv_dtype to float8_e4m3, too: what was rounded stays rounded"
            if there.dtype == "float8_e4m3"
            else "set model.dtype to one value"
        )
        yield _Difference("kv_layout.dtype", here.dtype, there.dtype, fix)
    has_head_windows = any(group.heads is not None for group in here.groups)
    ranks = (reader.tensor_parallel_size, source.tensor_parallel_size)
    if has_head_windows and ranks[0] != ranks[1]:
        yield _Difference(
            "tensor_parallel_size",
            *ranks,
            "kv_groups.head_window: use one engine.tensor_parallel_size",
        )


def _odd_ranks(side: Compatibility, role: str) -> Iterator[str]:
    """Yield why one side's ranks cannot be what it says."""
    if side.total_kv_heads < 1 or side.tensor_parallel_size < 1:
        yield (
            f"{role}: {side.tensor_parallel_size} ranks of {side.total_kv_heads} KV heads do not "
            "exist (run one Sluice version on both)"
        )
        return
    try:
        heads = heads_of_rank(side.total_kv_heads, rank=0, num_ranks=side.tensor_parallel_size)
    except ConfigError as error:
        yield f"{role}: {error} (change engine.tensor_parallel_size)"
        return
    if len(heads) != side.kv_layout.num_kv_heads:
        yield (
            f"kv_layout.num_kv_heads: {role} says {side.kv_layout.num_kv_heads}, but "
            f"{side.tensor_parallel_size} ranks of {side.total_kv_heads} heads have {len(heads)} "
            "each (run one Sluice version on both)"
        )


def _different_features(reader: Compatibility, source: Compatibility) -> Iterator[str]:
    fix = "run one Sluice version on both"
    missing = sorted(set(reader.features) - set(source.features))
    if missing:
        yield f"features: prefill lacks {', '.join(missing)} ({fix})"
    unknown = sorted(set(source.features) - set(reader.features))
    if unknown:
        yield f"features: decode lacks {', '.join(unknown)} ({fix})"
