"""Random numbers that are a function of (seed, position), not of a generator's state.

A sequence that is preempted, moves to another worker, or meets other sequences in its batch draws
the same numbers again, because there is no state that could differ.
"""

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, position), equidistributed over 2**53 values.

    Source: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), entered at its ``position``-th state. The
    seed is mixed first, or seeds that differ by the increment would give shifted copies of one
    stream.
    """
    state = _mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * _UNIT


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
