"""Cuts a loaded ``transformers`` model down to one rank's part, in place.

By the model's own plan (``config.base_model_tp_plan``): a *colwise* projection keeps some of its
output columns, a *rowwise* one takes as many input columns and its output is a partial sum, which
all ranks add up. So a layer needs two sums over the ranks, and everything between them (heads, the
MLP's columns) belongs to one rank alone. Embeddings and the output embedding are whole on each.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from core.errors import ConfigError
from core.kv_heads import heads_of_rank
from core.kv_layout import LayerSpec
from engine.probing import probe_layers
from engine.rank_group import RankGroup, RankPlace

COLWISE, ROWWISE = "colwise", "rowwise"
_WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise"}
"""Styles of parts that stay whole here: a norm over one head, embeddings."""
SUM_TOLERANCE = 1e-3
"""Of the norm of the difference over the whole's, in float32."""
_KEY_VALUE = ("k_proj", "v_proj")
_ATTENTION = ("q_proj", *_KEY_VALUE)


class RowwiseLinear(nn.Module):
    """One rank's input columns of a linear map; the result is the sum over all ranks."""

    def __init__(self, linear: nn.Linear, columns: slice) -> None:
        super().__init__()
        self.weight = _kept(linear.weight[:, columns])
        self.bias = linear.bias
        self.group: RankGroup | None = None
        """None, until the ranks have met: the result is this rank's part alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole map's output of this rank's columns ``x`` [..., in / ranks]."""
        output = nn.functional.linear(x, self.weight)
        if self.group is not None:
            self.group.all_reduce(output)
        return output if self.bias is None else output + self.bias


def take_part(
    module: Any,  # noqa: ANN401
    layers: Sequence[LayerSpec],
    place: RankPlace,
    *,
    device: torch.device,
    name: str,
) -> tuple[tuple[LayerSpec, ...], RankGroup]:
    """Cut ``module``, whose layers are ``layers``, down to the part of ``place``; meet the rest.

    ``module`` is in host memory; its part moves to ``device``.

    Returns:
        What the layers keep on this rank, and the group that every forward needs from now on.

    Raises:
        ConfigError: the model cannot be split so.
        InternalError: another rank did not come.
    """
    num_kv_heads = layers[0].num_kv_heads
    shard_model(module, num_kv_heads=num_kv_heads, rank=place.rank, num_ranks=place.num_ranks)
    part = probe_layers(module, module.config.get_text_config(), name=name)
    module.to(device)
    group = place.join(device)
    connect(module, group)
    return part, group


def shard_model(module: Any, *, num_kv_heads: int, rank: int, num_ranks: int) -> None:  # noqa: ANN401
    """Keep only what rank ``rank`` of ``num_ranks`` computes.

    Until ``connect`` a forward gives numbers that mean nothing, in the right shapes.

    Raises:
        ConfigError: the model's plan is not understood, or its heads or columns cannot be split.
            ``module`` must not be used any more.
    """
    config = module.config.get_text_config()
    split = _Split(config, num_kv_heads=num_kv_heads, rank=rank, num_ranks=num_ranks)
    planned = dict(_planned(module, config.base_model_tp_plan or {}))
    split.check_plan(module, planned)
    check_sums(module, planned, split, num_ranks=num_ranks)
    split.keep_part(module, planned)
    for part in _split_parents(module, planned).values():
        if _is_attention(part):
            attention: Any = part
            attention.num_key_value_groups = split.queries_per_kv_head


def connect(module: nn.Module, group: RankGroup) -> None:
    """From now on each forward is one of all ranks: they must run the same steps, in order."""
    for part in module.modules():
        if isinstance(part, RowwiseLinear):
            part.group = group


class _Split:
    """Arithmetic of one rank's part, and what cannot be split."""

    def __init__(self, config: Any, *, num_kv_heads: int, rank: int, num_ranks: int) -> None:  # noqa: ANN401
        self._config = config
        self._model_type: str = config.model_type
        self._rank, self._num_ranks = rank, num_ranks
        self._kv_heads = heads_of_rank(num_kv_heads, rank=rank, num_ranks=num_ranks)
        self._num_kv_heads = num_kv_heads
        self._num_layers: int = config.num_hidden_layers
        self._num_heads = num_heads = config.num_attention_heads
        if num_heads % num_ranks:
            raise self.refusal(f"its {num_heads} attention heads cannot be split evenly")
        self.queries_per_kv_head = num_heads // num_ranks // len(self._kv_heads)

    def check_plan(self, module: nn.Module, planned: Mapping[str, str]) -> None:
        """Raise unless each part of the layers is known to be split or to be whole."""
        for name, style in planned.items():
            if style not in {COLWISE, ROWWISE} | _WHOLE:
                raise self.refusal(f"{name} is to be split as {style!r}, which is not supported")
            is_split = style in {COLWISE, ROWWISE}
            if is_split and type(module.get_submodule(name)) is not nn.Linear:
                raise self.refusal(f"{name} is to be split, and is no plain linear map")
        parents = _split_parents(module, planned)
        for parent, part in parents.items():
            for name, _ in part.named_parameters():
                owner = f"{parent}.{name}".rpartition(".")[0]
                if owner not in planned:
                    raise self.refusal(f"its plan says nothing of {parent}.{name}")
        attentions = [name for name, part in parents.items() if _is_attention(part)]
        if len(attentions) != self._num_layers:
            raise self.refusal("its plan does not split the attention of every layer")
        for name in attentions:
            styles = {planned.get(f"{name}.{own}") for own in _ATTENTION}
            if styles != {COLWISE}:
                raise self.refusal(f"its plan does not split {name} into {', '.join(_ATTENTION)}")
            self._check_widths(module.get_submodule(name), name)

    def _check_widths(self, attention: Any, name: str) -> None:  # noqa: ANN401
        """Raise where a projection has more in it than its heads, such as a gate beside them."""
        (query, key, value) = (getattr(attention, own).out_features for own in _ATTENTION)
        if key != value or query * self._num_kv_heads != key * self._num_heads:
            raise self.refusal(
                f"the projections of {name} have {query}, {key} and {value} columns for "
                f"{self._num_heads} heads and {self._num_kv_heads} KV heads"
            )

    def of_rank(self, rank: int) -> "_Split":
        """Return the split of another rank."""
        return _Split(
            self._config, num_kv_heads=self._num_kv_heads, rank=rank, num_ranks=self._num_ranks
        )

    def keep_part(self, module: nn.Module, planned: Mapping[str, str]) -> None:
        """Keep this rank's part of what ``planned`` names in ``module``."""
        for name, style in planned.items():
            parent_name, _, own_name = name.rpartition(".")
            linear: Any = module.get_submodule(name)
            if style == COLWISE:
                self.keep_rows(linear, own_name)
            elif style == ROWWISE:
                parent = module.get_submodule(parent_name)
                setattr(parent, own_name, self.rowwise(linear, name))

    def keep_rows(self, linear: nn.Linear, own_name: str) -> None:
        """Keep this rank's output columns, which are rows of the weight."""
        if own_name in _KEY_VALUE:
            head_dim = linear.out_features // self._num_kv_heads
            rows = slice(self._kv_heads.start * head_dim, self._kv_heads.stop * head_dim)
        else:
            rows = self._share(linear.out_features, own_name)
        linear.weight = _kept(linear.weight[rows])
        if linear.bias is not None:
            linear.bias = _kept(linear.bias[rows])
        linear.out_features = rows.stop - rows.start

    def rowwise(self, linear: nn.Linear, name: str) -> RowwiseLinear:
        """Return the map of this rank's input columns."""
        return RowwiseLinear(linear, self._share(linear.in_features, name))

    def _share(self, width: int, name: str) -> slice:
        if width % self._num_ranks:
            raise self.refusal(f"the {width} columns of {name} cannot be split evenly")
        share = width // self._num_ranks
        return slice(self._rank * share, (self._rank + 1) * share)

    def refusal(self, reason: str) -> ConfigError:
        """Return the error that names the model's type, ``reason`` and the fix."""
        return ConfigError(
            f"engine.tensor_parallel_size={self._num_ranks}: a model of type "
            f"{self._model_type!r} cannot be split so: {reason}; use tensor_parallel_size: 1"
        )


@torch.inference_mode()
def check_sums(
    module: nn.Module, planned: Mapping[str, str], split: _Split, *, num_ranks: int
) -> None:
    """Raise unless the ranks' parts of an MLP add up to the whole, tried on the first of each kind.

    A plan may call fused projections colwise, whose halves a cut by columns would mix up.
    """
    seen: set[str] = set()
    for name, part in _split_parents(module, planned).items():
        kind = re.sub(r"\d+", "*", name)
        if _is_attention(part) or kind in seen:
            continue
        seen.add(kind)
        own = {
            inner.removeprefix(f"{name}."): style
            for inner, style in planned.items()
            if inner.startswith(f"{name}.")
        }
        try:
            error = _difference_of_sum(part, own, split, num_ranks=num_ranks)
        except (TypeError, RuntimeError, AttributeError) as failure:
            raise split.refusal(f"{name} cannot be tried in parts ({failure})") from failure
        if not error < SUM_TOLERANCE:
            raise split.refusal(f"the parts of {name} do not add up to it: they differ {error:.1e}")


def _difference_of_sum(
    part: nn.Module, planned: Mapping[str, str], split: _Split, *, num_ranks: int
) -> float:
    """Return how far the sum of the ranks' outputs is from the whole's, relative to it."""
    (first, *_) = [name for name, style in planned.items() if style == COLWISE] or [""]
    width: Any = part.get_submodule(first).in_features
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, width, generator=generator)
    whole = copy.deepcopy(part).float()
    expected = whole(x)
    total = torch.zeros_like(expected)
    for rank in range(num_ranks):
        piece = copy.deepcopy(whole)
        split.of_rank(rank).keep_part(piece, planned)
        if rank:
            _drop_biases(piece)
        total += piece(x)
    return float((total - expected).norm() / expected.norm())


def _drop_biases(piece: nn.Module) -> None:
    """A bias behind a sum is added once, by the first rank here."""
    for part in piece.modules():
        if isinstance(part, RowwiseLinear):
            part.bias = None


def _planned(module: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (name, style) of each submodule that ``plan`` names; ``*`` is one part of a name."""
    patterns = [
        (re.compile(r"(?:.+\.)?" + re.escape(name).replace(r"\*", r"[^.]+")), style)
        for name, style in plan.items()
    ]
    for name, _ in module.named_modules():
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                yield name, style


def _split_parents(module: nn.Module, planned: Mapping[str, str]) -> dict[str, nn.Module]:
    """Return by name the modules that have a split projection."""
    names = {name.rpartition(".")[0] for name, style in planned.items() if style not in _WHOLE}
    return {name: module.get_submodule(name) for name in sorted(names)}


def _is_attention(part: nn.Module) -> bool:
    return hasattr(part, "layer_idx")


def _kept(values: torch.Tensor) -> nn.Parameter:
    # A copy: a view would keep the whole weight in memory.
    return nn.Parameter(values.detach().clone(), requires_grad=False)
