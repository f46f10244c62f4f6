"""Chooses the next token of every row of a step's logits, each row by its own parameters.

Order, as in ``transformers``: penalties, min_tokens, temperature, filters. Then one uniform number
per row picks a token by inverse CDF in the vocabulary's order. Nothing of a row depends on another
row, and nothing is read back from an accelerator.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.filters import apply_filters
from engine.token_history import Penalties, TokenHistory


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


MIN_TEMPERATURE = 1e-5
"""Of what is not greedy: below it the likeliest token has it all, and quotients would overflow."""


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
    logits /= _to(device, np.maximum(rows.temperature[at], MIN_TEMPERATURE))[:, None]
    # In place on a CPU, where fresh pages for [rows, vocab] cost more than the arithmetic.
    probs = torch.softmax(logits, dim=-1, out=logits if device.type == "cpu" else None)
    apply_filters(probs, rows.top_k[at], rows.top_p[at], rows.min_p[at])
    # A scan on an accelerator adds in another order at each element: only float64 keeps the CDF
    # sorted there. On a CPU it is sequential.
    cdf = probs.cumsum_(dim=-1) if device.type == "cpu" else probs.cumsum(-1, dtype=torch.float64)
    uniform = _to(device, rows.uniform[at])[:, None]
    total = cdf[:, -1:]
    drawn = torch.nextafter(total, torch.zeros_like(total)).minimum((uniform * total).to(cdf.dtype))
    tokens = torch.searchsorted(cdf, drawn, right=True).squeeze(1)
    # NaN is found behind the end; the runner reports it, and until then ids must be valid.
    return tokens.clamp_(max=logits.shape[1] - 1)


def _to(device: torch.device, values: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
