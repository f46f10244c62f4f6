"""KV in float8: e4m3 numbers with one float32 scale per token and head.

A scale of its own makes each row as exact as e4m3 can be, whatever the model's range: nothing is
calibrated, saturates or vanishes. The compiled kernels (``native/float8.h``) give the same bytes.
Format: https://arxiv.org/abs/2209.05433, without infinities (e4m3fn).
"""

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of e4m3; the largest number of a row is mapped onto it."""
_PER_LARGEST = 1 / LARGEST
"""Multiplied with: some devices turn a division by a constant into this, others do not."""
_SMALLEST_SCALE = 2.0**-126
"""Normal: what devices make of subnormal numbers differs."""


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 numbers, shaped as ``values`` [..., heads, head_dim], and scales [..., heads].

    Depends on each row alone. ``values`` are what a step would have kept without float8, in the
    model's dtype; only then are the bytes those that the step writes. A row with a number that is
    not finite gets the scale NaN, so that whatever reads it is seen to be damaged.
    """
    values = values.float()
    peaks = values.abs().amax(dim=-1)
    scales = (peaks * _PER_LARGEST).clamp(min=_SMALLEST_SCALE)
    scales = torch.where(peaks.isfinite(), scales, torch.nan)
    return (values / scales.unsqueeze(-1)).to(FLOAT8), scales


def dequantise(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 values of what ``quantise`` gave."""
    return numbers.float() * scales.unsqueeze(-1)
