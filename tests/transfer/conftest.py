"""One prefill and one decode side over an adversary network, validated after each test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.transfer.adversary import Network
from tests.transfer.two_sides import DecodeSide, PrefillSide, layout

MakeDecode = Callable[..., DecodeSide]


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def make_decode(network: Network) -> Iterator[MakeDecode]:
    """Make decode sides; each is validated at the end."""
    made: list[DecodeSide] = []

    def make(kv_layout: Any = None, **options: Any) -> DecodeSide:
        side = DecodeSide(network, kv_layout or layout(), **options)
        made.append(side)
        return side

    yield make
    for side in made:
        side.check()


@pytest.fixture
def prefill(network: Network) -> PrefillSide:
    return PrefillSide(network, layout())


@pytest.fixture
def decode(make_decode: MakeDecode, prefill: PrefillSide) -> DecodeSide:
    side = make_decode()
    side.pair(prefill)
    return side
