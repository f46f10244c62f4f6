"""The cut-offs of top_k, top_p and min_p, against sorting everything."""

import numpy as np
import pytest
import torch

from engine.filters import apply_filters

VOCAB = 700


def distributions() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    random = [
        torch.softmax(torch.randn(VOCAB, generator=generator) * scale, -1)
        for scale in (0.01, 1.0, 4.0, 30.0)
    ]
    coarse = torch.softmax((torch.randn(VOCAB, generator=generator) * 4).round(), -1)  # ties
    certain = torch.zeros(VOCAB)
    certain[VOCAB - 1] = 1.0
    two = torch.zeros(VOCAB)
    two[[3, 5]] = torch.tensor([0.25, 0.75])
    return [*random, coarse, certain, two, torch.full((VOCAB,), 1 / VOCAB)]


def expected_kept(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return which tokens stay: the definition, by full sorts in float64."""
    ordered = probs.double().sort(descending=True).values[:top_k]
    before = ordered.cumsum(0) - ordered
    if top_p < 1.0:
        ordered = ordered[before < top_p * ordered.sum()]
    return (probs >= ordered[-1]) & (probs >= torch.tensor(min_p) * probs.max())


@pytest.mark.parametrize("top_k", [1, 2, 50, VOCAB])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999, 1 - 1e-12, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_kept_tokens_keep_their_probability_and_the_others_get_none(
    top_k: int, top_p: float, min_p: float
) -> None:
    for probs in distributions():
        result = probs[None].clone()
        apply_filters(result, np.array([top_k]), np.array([top_p]), np.array([min_p], np.float32))
        kept = expected_kept(probs, top_k, top_p, min_p)
        assert torch.equal(result[0], probs * kept)


def test_rows_are_filtered_independently() -> None:
    probs = torch.stack(distributions())
    top_k = np.array([1, VOCAB, 50, VOCAB, 2, VOCAB, 7, VOCAB])
    top_p = np.array([1.0, 0.5, 0.9, 1.0, 0.3, 0.99, 1.0, 0.9])
    min_p = np.array([0.0, 0.0, 0.1, 0.2, 0.0, 0.5, 0.0, 0.0], np.float32)
    together = probs.clone()
    apply_filters(together, top_k, top_p, min_p)
    for row in range(len(probs)):
        alone = probs[row : row + 1].clone()
        one = slice(row, row + 1)
        apply_filters(alone, top_k[one], top_p[one], min_p[one])
        assert torch.equal(alone[0], together[row])
