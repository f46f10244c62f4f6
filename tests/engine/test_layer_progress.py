"""A marked layer is reported only when its KV is in the pool, and the numbers stay the same.

Whoever is told reads the layer's bytes at once, from another process: a report that comes before
the write hands out what the block held before (B12). The next layers still compute meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from core.ids import Slot, StepSeq
from core.sampling import SamplingParams
from engine import runner
from engine.batch import SequenceInput, SlotOpening, StepBatch
from engine.forward import PagedModel
from engine.layer_progress import LayerProgress, report_layers
from engine.loading import load_model
from engine.native_layers import LayerRun
from engine.plan import build_plan
from engine.runner import ModelRunner
from tests.engine.tiny_models import make_tiny_model

BLOCK_SIZE = 8
LENGTHS = (21, 40, 3)
NUM_BLOCKS = 64
STALE = 9
FAMILIES = ("llama", "gemma3", "gpt_oss", "qwen3")

MakeModel = Callable[..., PagedModel]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {each: make_tiny_model(each, tmp_path_factory.mktemp(each)) for each in FAMILIES}


@pytest.fixture
def make_model(folders: dict[str, Path]) -> MakeModel:
    def make(
        family: str = "llama",
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        attention: Literal["auto", "reference"] = "auto",
    ) -> PagedModel:
        loaded = load_model(
            folders[family], dtype=dtype, device="cpu", attention=attention, num_threads=1
        )
        return PagedModel(loaded, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)

    return make


def sequences_of(model: PagedModel) -> tuple[SequenceInput, ...]:
    """Three prompts, each in blocks of its own."""
    random = np.random.default_rng(3)
    free = iter(range(NUM_BLOCKS))
    return tuple(
        SequenceInput(
            slot=Slot(slot),
            token_ids=random.integers(3, model.spec.vocab_size, length).tolist(),
            position=0,
            block_tables=tuple(
                np.array([next(free) for _ in range(-(-length // BLOCK_SIZE))], dtype=np.int32)
                for _ in model.kv_pool.layout.groups
            ),
            sample=True,
        )
        for slot, length in enumerate(LENGTHS)
    )


def batch_of(model: PagedModel, *marks: int) -> StepBatch:
    sequences = sequences_of(model)
    greedy = SamplingParams(seed=0, max_tokens=4, temperature=0.0)
    return StepBatch(
        step=StepSeq(1),
        openings=tuple(SlotOpening(s.slot, greedy, s.token_ids or ()) for s in sequences),
        sequences=sequences,
        layer_marks=marks,
    )


def kv_of(model: PagedModel, layers: Sequence[int]) -> list[torch.Tensor]:
    """Return a copy of all that the three prompts' blocks have of ``layers``."""
    layout, blocks = model.kv_pool.layout, model.kv_pool.blocks.view(torch.uint8)
    nbytes = layout.layer_nbytes
    tables = [each.block_tables for each in sequences_of(model)]
    blocks_of_group = [np.concatenate(of_group) for of_group in zip(*tables, strict=True)]
    return [
        blocks[blocks_of_group[at], place * nbytes : (place + 1) * nbytes]
        for at, group in enumerate(layout.groups)
        for place, layer in enumerate(group.layers)
        if layer in layers
    ]


@dataclass
class Seen:
    """What a reader finds at each mark, and whether it is what the step leaves in the end."""

    marks: list[int]
    is_final: list[bool]


def run_and_look(model: PagedModel, *marks: int) -> Seen:
    """Run a step; whoever is told of a mark copies all layers up to it at once."""
    copies: list[tuple[int, list[torch.Tensor]]] = []
    with torch.inference_mode():
        model.kv_pool.blocks.view(torch.uint8).fill_(STALE)

    def read(mark: int) -> None:
        copies.append((mark, kv_of(model, range(mark + 1))))

    ModelRunner(model, max_num_seqs=4).launch(batch_of(model, *marks), read).wait()
    return Seen(
        marks=[mark for mark, _ in copies],
        is_final=[
            all(map(torch.equal, found, kv_of(model, range(mark + 1)))) for mark, found in copies
        ],
    )


@pytest.mark.parametrize("attention", ["auto", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_b12_a_layer_is_reported_when_its_kv_is_in_the_pool(
    make_model: MakeModel, family: str, attention: str
) -> None:
    model = make_model(family, attention=attention)
    seen = run_and_look(model, 0, 2, 3)
    assert seen == Seen(marks=[0, 2, 3], is_final=[True, True, True])


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_a_layer_is_reported_while_later_ones_are_still_to_come(
    make_model: MakeModel, attention: str
) -> None:
    model = make_model(attention=attention)
    later: list[bool] = []
    with torch.inference_mode():
        model.kv_pool.blocks.view(torch.uint8).fill_(STALE)

    def look(mark: int) -> None:
        later.append(all(bool((part == STALE).all()) for part in kv_of(model, [mark + 1])))

    # With one thread nothing of the next layer has begun; two may have
    ModelRunner(model, max_num_seqs=4).launch(batch_of(model, 0, 2), look).wait()
    assert len(later) == 2
    assert attention == "auto" or all(later)


class ReportsEarly(LayerProgress):
    """The guard switched off: a mark is reported at the layer before it."""

    def marks_in(self, layers: range) -> tuple[int, ...]:
        return tuple(mark - 1 for mark in super().marks_in(layers) if mark - 1 in layers)

    def complete(self, layer: int) -> None:
        super().complete(layer + 1)


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_b12_fails_where_a_layer_is_reported_before_its_kv_is_written(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    monkeypatch.setattr(runner, "LayerProgress", ReportsEarly)
    model = make_model(attention=attention)
    assert not any(run_and_look(model, 1, 3).is_final), "the reader has the bytes of before"


def test_compiled_layers_are_one_run_whether_or_not_there_are_marks(make_model: MakeModel) -> None:
    model = make_model()
    runs = [part for part in model._module.modules() if isinstance(part, LayerRun)]
    assert len(runs) == 1, "the tests above are about a run that is told of marks inside"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_marks_change_no_bit_of_the_logits(make_model: MakeModel, family: str, dtype: str) -> None:
    model = make_model(family, dtype=dtype)
    plan = build_plan(sequences_of(model), model.kv_pool.layout, device=model.device)
    told: list[int] = []

    plain = model.forward(plan)
    marked = model.forward(plan, LayerProgress((0, 1, 2), told.append))

    assert told == [0, 1, 2]
    assert torch.equal(plain, marked)


def test_a_mark_is_reported_once_even_if_layers_report_late() -> None:
    told: list[int] = []
    progress = LayerProgress((1, 4, 6), told.append)
    for layer in (0, 5, 5, 7):
        progress.complete(layer)
    assert told == [1, 4, 6]


def test_a_model_whose_layers_are_not_found_reports_none_and_runs(make_model: MakeModel) -> None:
    model = make_model(attention="reference")
    report_layers(torch.nn.Sequential(torch.nn.Linear(1, 1)), 4)
    assert run_and_look(model).marks == []
