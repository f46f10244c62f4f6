"""Guards the forward: logits that drift from ``transformers`` give plausible, wrong text.

Each family runs mixed batches over scattered blocks, as a worker would: chunks of prompts beside
single tokens of other sequences; logits are held against one full forward without a cache. Every
byte that a sequence may not read is NaN: free blocks, unwritten slots, blocks behind the window.
"""

from pathlib import Path
from typing import Literal

import pytest
import torch

from engine.forward import PagedModel
from engine.loading import load_model
from tests.engine.mixed_batches import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    expected_logits,
    random_sequences,
    run_in_parts,
)
from tests.engine.tiny_models import FAMILIES, make_tiny_model

SMOLLM2 = Path.home() / ".cache/sluice/models/SmolLM2-135M-Instruct"

ATTENTIONS: tuple[Literal["reference", "native"], ...] = ("reference", "native")


@pytest.fixture(scope="module")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(family, root / family) for family in FAMILIES}


def load(folder: Path, dtype: Literal["float32", "bfloat16"], attention: str) -> PagedModel:
    loaded = load_model(folder, dtype=dtype, device="cpu", attention=attention)
    torch.set_num_threads(1)  # the kernels keep theirs, which do not spin
    return PagedModel(loaded, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_give_the_logits_of_transformers_in_float32(
    tiny_folders: dict[str, Path], family: str, attention: str
) -> None:
    model = load(tiny_folders[family], "float32", attention)
    sequences = random_sequences(model.spec.vocab_size)

    results = run_in_parts(model, sequences)

    expected = expected_logits(tiny_folders[family], torch.float32)
    for sequence, position, logits in results:
        torch.testing.assert_close(logits, expected[sequence][position], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_stay_near_float32_logits_in_bfloat16(
    tiny_folders: dict[str, Path], family: str, attention: str
) -> None:
    """Rounding differs by implementation, so ours may be as far from the truth as theirs is."""
    model = load(tiny_folders[family], "bfloat16", attention)
    sequences = random_sequences(model.spec.vocab_size)

    results = run_in_parts(model, sequences)

    truth = expected_logits(tiny_folders[family], torch.float32)
    theirs = expected_logits(tiny_folders[family], torch.bfloat16)
    our_error = torch.stack([(row - truth[s][p]).square().mean() for s, p, row in results])
    their_error = torch.stack([(theirs[s][p] - truth[s][p]).square().mean() for s, p, _ in results])
    assert our_error.mean().sqrt() <= 1.25 * their_error.mean().sqrt()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_mixed_batches_give_the_logits_of_transformers_for_the_default_model(
    attention: str,
) -> None:
    if not SMOLLM2.is_dir():
        pytest.skip(f"the default model is not in {SMOLLM2}")
    model = load(SMOLLM2, "float32", attention)
    sequences = random_sequences(model.spec.vocab_size)

    results = run_in_parts(model, sequences)

    expected = expected_logits(SMOLLM2, torch.float32)
    for sequence, position, logits in results:
        torch.testing.assert_close(logits, expected[sequence][position], rtol=1e-4, atol=1e-3)
