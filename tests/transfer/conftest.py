"""One prefill and one decode side over an adversary network, validated after each test.

For the conformance suite: real processes that serve pools over each transport.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.transfer.adversary import Network
from tests.transfer.source_process import SourceProcess
from tests.transfer.transport_cases import CASES, NBYTES, Case, Side
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


MakeSource = Callable[..., SourceProcess]


def _param(case: Case) -> object:
    """Each transport and each path is in every run; a pair with a stated limit is with the slow."""
    marks = [pytest.mark.slow] if case.source_dies_with_readers else []
    return pytest.param(case, id=str(case), marks=marks)


@pytest.fixture(params=[_param(case) for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def make_source(case: Case) -> Iterator[MakeSource]:
    made: list[SourceProcess] = []

    def make(name: str = "source", seed: int = 1) -> SourceProcess:
        made.append(
            SourceProcess(
                name,
                NBYTES,
                ucx_options=case.options,
                seed=seed,
                transport=case.transport,
                is_nameless=case.is_nameless,
            )
        )
        return made[-1]

    yield make
    for source in made:
        source.close()


@pytest.fixture
def source(make_source: MakeSource) -> SourceProcess:
    return make_source()


@pytest.fixture
def side(case: Case) -> Iterator[Side]:
    side = Side(case)
    yield side
    side.transport.close()
