"""Guards the compiled products: tile edges, padding and blocking are where kernels go wrong."""

import logging
from pathlib import Path

import pytest
import torch

from core.errors import ConfigError
from engine.loading import load_model
from engine.native_library import NativeLibrary, open_native_library
from tests.engine.tiny_models import make_tiny_model


@pytest.fixture(scope="module", params=[1, 3])
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return open_native_library(num_threads=request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 96, 97, 200])
@pytest.mark.parametrize(("inner", "columns"), [(2, 1), (24, 32), (64, 33), (96, 95), (2050, 129)])
def test_product_equals_torch(
    library: NativeLibrary, dtype: torch.dtype, rows: int, inner: int, columns: int
) -> None:
    generator = torch.Generator().manual_seed(rows * inner * columns)
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    weight = torch.randn(columns, inner, generator=generator).to(dtype)
    bias = torch.randn(columns, generator=generator).to(dtype)

    ours = library.linear(x, library.pack(weight, bias))

    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5 * inner**0.5 * 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_does_not_depend_on_its_neighbours(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    """Bit for bit: a request's text must not change with what else is in the batch."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(131, 2100, generator=generator).to(dtype)
    matrix = library.pack(torch.randn(70, 2100, generator=generator).to(dtype), None)

    together = library.linear(x, matrix)
    alone = torch.cat([library.linear(x[row : row + 1], matrix) for row in range(len(x))])

    assert torch.equal(together, alone)


def test_rows_are_taken_in_the_given_order(library: NativeLibrary) -> None:
    weight = torch.arange(64.0).view(32, 2)
    order = torch.arange(31, -1, -1, dtype=torch.int32)

    ours = library.linear(torch.tensor([[1.0, 0.0]]), library.pack(weight, None, order))

    assert torch.equal(ours[0], weight[order.long(), 0])


def test_without_a_compiler_native_is_refused_and_auto_takes_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_model("llama", tmp_path / "llama")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    with pytest.raises(ConfigError, match=r"no C\+\+ compiler .*install g\+\+"):
        load_model(folder, dtype="float32", device="cpu", attention="native")
    with caplog.at_level(logging.WARNING, logger="engine"):
        loaded = load_model(folder, dtype="float32", device="cpu", attention="auto")

    assert loaded.library is None
    assert ["plain torch" in record.message for record in caplog.records] == [True]


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ConfigError, match=r"false cannot compile the kernels"):
        open_native_library(num_threads=1, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
