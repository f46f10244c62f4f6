"""top_k, top_p and min_p as cut-off probabilities: what lies below a row's cut gets none.

The tokens keep their vocabulary order, and those that tie at the cut all stay, so the result does
not depend on how a sort breaks ties. Order and meaning are those of ``transformers``' warpers.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

_BIN_SHIFT = 18
"""Bits of a float32 below those that name its bin: 5 of the mantissa stay, so bins are 3 % wide."""


def apply_filters(
    probs: torch.Tensor,
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float32],
) -> None:
    """Set excluded tokens of ``probs`` [rows, vocab] to 0, in place, without scaling the others.

    Off are a ``top_k`` of the vocabulary's size, a ``top_p`` of 1, a ``min_p`` of 0.
    """
    device = probs.device
    has_top_k = top_k < probs.shape[1]
    (ranked,) = np.nonzero(has_top_k)
    (nucleus,) = np.nonzero(~has_top_k & (top_p < 1.0))
    (relative,) = np.nonzero(min_p)
    _cut(probs, ranked, lambda some: _ranked_cutoffs(some, top_k[ranked], top_p[ranked]))
    _cut(probs, nucleus, lambda some: _nucleus_cutoffs(some, top_p[nucleus]))
    _cut(probs, relative, lambda some: _to(device, min_p[relative]) * some.amax(dim=-1))


def _cut(
    probs: torch.Tensor, at: NDArray[np.intp], cutoffs: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    if not len(at):
        return
    if len(at) == len(probs):
        _clear_below(probs, cutoffs(probs))
        return
    index = _to(probs.device, at)
    some = probs.index_select(0, index)
    _clear_below(some, cutoffs(some))
    probs[index] = some


def _clear_below(probs: torch.Tensor, cutoffs: torch.Tensor) -> None:
    if probs.device.type == "cpu":
        # torch does not vectorise the product of floats and booleans; numpy takes a quarter.
        values = probs.numpy()
        np.multiply(values, values >= cutoffs.numpy()[:, None], out=values)
    else:
        probs.mul_(probs >= cutoffs[:, None])


def _ranked_cutoffs(
    probs: torch.Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]
) -> torch.Tensor:
    """Return the smallest probability that top_k, and then top_p, keep in each row."""
    likeliest = probs.topk(int(top_k.max()), dim=-1).values
    return _kept_by_top_p(likeliest, _to(probs.device, top_k)[:, None], top_p)


def _nucleus_cutoffs(probs: torch.Tensor, top_p: NDArray[np.float64]) -> torch.Tensor:
    """Return the smallest probability that top_p alone keeps in each row."""
    if probs.device.type == "cpu":
        # A sort takes ten times as long.
        cutoffs = [_nucleus_cutoff(row, p) for row, p in zip(probs.numpy(), top_p, strict=True)]
        return torch.tensor(cutoffs)
    ordered = probs.sort(dim=-1, descending=True).values
    everything = torch.full((len(probs), 1), probs.shape[1], device=probs.device)
    return _kept_by_top_p(ordered, everything, top_p)


def _kept_by_top_p(
    ordered: torch.Tensor, top_k: torch.Tensor, top_p: NDArray[np.float64]
) -> torch.Tensor:
    """Return each row's last kept value of ``ordered``, largest first, of which top_k are there.

    A token stays while the tokens before it hold less than ``top_p`` of what top_k left.
    """
    mass = ordered.cumsum(dim=-1, dtype=torch.float64)
    # A top_p that is off must keep the tail, whatever its sum is rounded to.
    share = _to(ordered.device, np.where(top_p < 1.0, top_p, np.inf))[:, None]
    share = share * mass.gather(1, top_k - 1)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    kept = (mass - ordered < share) & (rank < top_k)
    last = kept.sum(dim=-1, keepdim=True).clamp_(min=1) - 1
    return ordered.gather(1, last).squeeze(1)


def _nucleus_cutoff(probs: NDArray[np.float32], top_p: float) -> float:
    """Return the same for one row, by sorting only the bin of values where the nucleus ends.

    Positive floats are ordered as their bits are, so the upper bits are a histogram's bins.
    """
    # Unsigned: a NaN, such as a penalty next to nothing makes, may have its sign set.
    bins = probs.view(np.uint32) >> _BIN_SHIFT
    mass = np.bincount(bins, weights=probs)
    mass_from = np.cumsum(mass[::-1])[::-1]
    share = top_p * mass_from[0]
    last_bin = int(np.searchsorted(-mass_from, -share, side="right")) - 1
    members = np.sort(probs[bins == last_bin])[::-1]
    mass_through = mass_from[last_bin] - mass[last_bin] + np.cumsum(members, dtype=np.float64)
    num_kept = 1 + int(np.searchsorted(mass_through[:-1], share))
    return float(members[num_kept - 1])


def _to(device: torch.device, values: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
