"""Log-probabilities of the raw distribution, for the rows of a step that ask for them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from core.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RawDistribution:
    """Copies from a step's logits, taken before the sampler overwrites them."""

    rows: torch.Tensor
    """[L] int64: rows of the step's logits."""
    logits: torch.Tensor
    """[L, vocab]."""
    num_top: NDArray[np.int64]
    """[L]: how many likeliest tokens each row wants."""


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Results on one device; ``num_top`` says how much of the width each row wants."""

    chosen: torch.Tensor
    """[L]."""
    top_ids: torch.Tensor
    """[L, widest], likeliest first."""
    top_values: torch.Tensor
    num_top: NDArray[np.int64]

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "StepLogprobs":
        """Return the same with every tensor moved."""
        return StepLogprobs(
            chosen=move(self.chosen),
            top_ids=move(self.top_ids),
            top_values=move(self.top_values),
            num_top=self.num_top,
        )


def copy_raw(
    logits: torch.Tensor, rows: NDArray[np.int64], num_top: NDArray[np.int64]
) -> RawDistribution:
    """Return the rows' raw logits."""
    index = torch.from_numpy(rows).to(logits.device, non_blocking=True)
    return RawDistribution(rows=index, logits=logits.index_select(0, index), num_top=num_top)


def logprobs_of(raw: RawDistribution, tokens: torch.Tensor) -> StepLogprobs:
    """Return the log-probabilities of each row's token among ``tokens``, and of the likeliest."""
    normaliser = raw.logits.logsumexp(dim=-1, keepdim=True)
    chosen = raw.logits.gather(1, tokens[raw.rows][:, None]) - normaliser
    widest = min(int(raw.num_top.max()), raw.logits.shape[1])
    (values, ids) = raw.logits.topk(widest, dim=-1)
    return StepLogprobs(
        chosen=chosen.squeeze(1), top_ids=ids, top_values=values - normaliser, num_top=raw.num_top
    )


def to_values(logprobs: StepLogprobs) -> list[TokenLogprobs]:
    """Return one value per row. The tensors are on the host and complete."""
    return [
        TokenLogprobs(chosen=chosen, top=tuple(zip(ids[:count], values[:count], strict=True)))
        for chosen, ids, values, count in zip(
            logprobs.chosen.tolist(),
            logprobs.top_ids.tolist(),
            logprobs.top_values.tolist(),
            logprobs.num_top.tolist(),
            strict=True,
        )
    ]
