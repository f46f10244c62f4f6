"""Chooses the next token of every row of a step's logits, each row by its own parameters.

Order, as in ``transformers``: penalties, min_tokens, temperature, top_k, top_p, min_p. A filter is
a cut-off probability, below which tokens get none, so ties at the cut all stay and the tokens keep
their vocabulary order: one uniform number per row then picks by inverse CDF. Nothing of a row
depends on another row, and nothing is read back from an accelerator.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.token_history import Penalties, TokenHistory

_FIRST_CANDIDATES = 256
_CANDIDATES_GROWTH = 16


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of a step's logits, one entry per row; a filter that is off has its neutral value.

    ``temperature`` is 0 for greedy rows, ``top_k`` the vocabulary's size where it is off.
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float32]
    uniform: NDArray[np.float64]
    """In [0, 1): the row's random number at this position."""
    penalties: Penalties | None
    banned: tuple[NDArray[np.int64], NDArray[np.int64]] | None
    """(rows, token ids): pairs that cannot be sampled in this step."""


def sample(logits: torch.Tensor, rows: SamplingRows, history: TokenHistory) -> torch.Tensor:
    """Return the sampled token ids [rows], int64. Overwrites ``logits`` [rows, vocab], float32."""
    if rows.penalties is not None:
        history.apply(logits, rows.penalties)
    if rows.banned is not None:
        (row_index, token_index) = (_to(logits.device, index) for index in rows.banned)
        logits[row_index, token_index] = -torch.inf
    (random_rows,) = np.nonzero(rows.temperature)
    if not len(random_rows):
        return logits.argmax(dim=-1)
    if len(random_rows) == len(logits):
        return _draw(logits, rows, random_rows)
    tokens = logits.argmax(dim=-1)
    index = _to(logits.device, random_rows)
    tokens[index] = _draw(logits.index_select(0, index), rows, random_rows)
    return tokens


def _draw(logits: torch.Tensor, rows: SamplingRows, at: NDArray[np.intp]) -> torch.Tensor:
    """Return a token for each of ``logits``, which are those of ``rows`` at ``at``."""
    device = logits.device
    logits /= _to(device, rows.temperature[at])[:, None]
    probs = torch.softmax(logits, dim=-1, out=logits)
    _filter(probs, rows, at)
    # A scan on an accelerator adds in another order at each element: only float64 keeps the CDF
    # sorted there. On a CPU it is sequential, and float32 in place saves most of the time.
    cdf = probs.cumsum_(dim=-1) if device.type == "cpu" else probs.cumsum(-1, dtype=torch.float64)
    uniform = _to(device, rows.uniform[at])[:, None]
    total = cdf[:, -1:]
    drawn = torch.nextafter(total, torch.zeros_like(total)).minimum((uniform * total).to(cdf.dtype))
    return torch.searchsorted(cdf, drawn, right=True).squeeze(1)


def _filter(probs: torch.Tensor, rows: SamplingRows, at: NDArray[np.intp]) -> None:
    """Set the tokens that top_k, top_p and min_p exclude to 0, in place."""
    (top_k, top_p, min_p) = (rows.top_k[at], rows.top_p[at], rows.min_p[at])
    (by_order,) = np.nonzero((top_k < probs.shape[1]) | (top_p < 1.0))
    if len(by_order):
        _cut(probs, by_order, _order_cutoffs(probs, by_order, top_k, top_p))
    (by_ratio,) = np.nonzero(min_p)
    if len(by_ratio):
        index = _to(probs.device, by_ratio)
        likeliest = probs.index_select(0, index).amax(dim=-1)
        _cut(probs, by_ratio, _to(probs.device, min_p[by_ratio]) * likeliest)


def _cut(probs: torch.Tensor, at: NDArray[np.intp], cutoffs: torch.Tensor) -> None:
    if len(at) == len(probs):
        probs.masked_fill_(probs < cutoffs[:, None], 0.0)
        return
    index = _to(probs.device, at)
    chosen = probs.index_select(0, index)
    probs[index] = chosen.masked_fill_(chosen < cutoffs[:, None], 0.0)


def _order_cutoffs(
    probs: torch.Tensor, at: NDArray[np.intp], top_k: NDArray[np.int64], top_p: NDArray[np.float64]
) -> torch.Tensor:
    """Return the smallest probability that top_k and top_p keep, for the rows ``at``.

    A CPU looks at the likeliest few tokens first and goes on only with the rows whose nucleus is
    larger; an accelerator orders what the parameters alone ask for, since looking would wait.
    """
    vocab_size = probs.shape[1]
    cutoffs = probs.new_empty(len(at))
    todo = np.arange(len(at))
    candidates = int(top_k[at][top_k[at] < vocab_size].max(initial=_FIRST_CANDIDATES))
    if probs.device.type != "cpu" and (top_k[at] >= vocab_size).any():
        candidates = vocab_size
    while len(todo):
        (k, p) = (top_k[at[todo]], top_p[at[todo]])
        chosen = probs.index_select(0, _to(probs.device, at[todo]))
        (found, enough) = _cutoffs_among(_likeliest(chosen, candidates), k, p)
        cutoffs[_to(probs.device, todo)] = found
        if candidates >= int(k.max()):
            break
        todo = todo[~(enough.numpy() | (k <= candidates))]
        candidates = min(candidates * _CANDIDATES_GROWTH, vocab_size)
    return cutoffs


def _likeliest(probs: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``count`` largest of each row, largest first."""
    if count < probs.shape[1]:
        return probs.topk(count, dim=-1).values
    if probs.device.type == "cpu":
        # numpy's vectorised sort takes a third of torch's time for values alone.
        return torch.from_numpy(np.sort(probs.numpy(), axis=-1)[:, ::-1].copy())
    return probs.sort(dim=-1, descending=True).values


def _cutoffs_among(
    ordered: torch.Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's last kept value among ``ordered``, and whether top_p ends before its end.

    As in ``transformers``' TopPLogitsWarper, a token stays while the tokens before it hold less
    than ``top_p`` of what top_k left.
    """
    device = ordered.device
    k = _to(device, np.minimum(top_k, ordered.shape[1]))[:, None]
    mass = ordered.cumsum(dim=-1, dtype=torch.float64)
    whole = mass.gather(1, k - 1)
    # With top_k off, top_p is a part of everything, seen here or not.
    whole = torch.where(
        _to(device, top_k > ordered.shape[1])[:, None], torch.ones_like(whole), whole
    )
    # A top_p that is off must keep the tail, whatever its sum is rounded to.
    share = _to(device, np.where(top_p < 1.0, top_p, np.inf))[:, None] * whole
    kept = (mass - ordered < share) & (torch.arange(ordered.shape[1], device=device) < k)
    last = kept.sum(dim=-1, keepdim=True).clamp_(min=1) - 1
    enough = mass[:, -1:] >= share
    return ordered.gather(1, last).squeeze(1), enough.squeeze(1)


def _to(device: torch.device, values: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
