"""What a request asks of its sampling ends no worker, and harms no other request.

The failure guarded against: a temperature next to nothing made NaN of its row's logits, and the
filter of the step raised over it.
"""

import numpy as np
import pytest
import torch

from engine.filters import apply_filters
from engine.sampler import SamplingRows, sample
from engine.token_history import TokenHistory


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000], ids=["positive", "negative"])
@pytest.mark.parametrize("top_k", [6, 5], ids=["top_p", "top_k and top_p"])
def test_a_row_without_numbers_raises_nothing_and_harms_no_other(bits: int, top_k: int) -> None:
    nan = np.array([bits], dtype=np.uint32).view(np.float32)[0]
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05, 0.0, 0.0]] * 2)
    probs[1] = torch.from_numpy(np.full(6, nan, dtype=np.float32))
    apply_filters(probs, np.full(2, top_k), np.full(2, 0.7), np.zeros(2))
    assert probs[0].tolist() == pytest.approx([0.5, 0.3, 0, 0, 0, 0])
    assert not probs[1].isfinite().any()


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 30.0, -5.0, 29.0, 7.0, 2.0]])
    rows = SamplingRows(
        temperature=np.array([temperature], dtype=np.float32),
        top_k=np.array([6]),
        top_p=np.array([0.7]),
        min_p=np.zeros(1, dtype=np.float32),
        uniform=np.array([0.999]),
        penalties=None,
        banned=None,
    )
    history = TokenHistory(num_slots=1, vocab_size=6, device=torch.device("cpu"))
    assert sample(logits, rows, history).tolist() == [1]
