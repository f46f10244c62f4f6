"""Whole models whose heads have windows, paged and pruned, give the text of ``transformers``.

``transformers`` gets a dense mask per head and no cache; we get a pool whose free blocks are NaN,
prefix hits, and a preemption in the middle.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from blockmgr.block_manager import BlockManager
from blockmgr.free_queue import BlockIds
from blockmgr.states import BlockState
from blockmgr.token_run import TokenRun, namespace_of
from core.config import HeadWindowConfig, SluiceConfig
from core.errors import ConfigError
from core.ids import Attempt, Owner, RequestId, Slot
from core.sampling import SamplingParams
from engine.batch import SequenceInput, SlotOpening, StepBatch
from engine.forward import PagedModel
from engine.kv_pool import KVPool
from engine.loading import load_model
from engine.native_layers import AbsorbedLayer, LayerRun
from engine.plan import build_plan
from engine.runner import ModelRunner
from engine.startup import start_engine
from tests.engine.head_masks import visible_by_head
from tests.engine.tiny_models import make_tiny_model

BLOCK_SIZE = 8
NUM_BLOCKS = 160
CHUNK = 21
NUM_OUTPUTS = 24
GREEDY = SamplingParams(seed=0, max_tokens=999, temperature=0.0)


def make_llama_of_three_kv_heads(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {family: make_tiny_model(family, root / family) for family in ("gemma2", "gpt_oss")}
    return {**made, "llama": make_llama_of_three_kv_heads(root / "llama")}


def load(folder: Path, window: HeadWindowConfig | None, attention: str = "native") -> PagedModel:
    loaded = load_model(
        folder,
        dtype="float32",
        device="cpu",
        attention=attention,
        num_threads=1,
        head_window=window,
    )
    return PagedModel(loaded, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


class PoisonFree:
    """Makes NaN of every block that becomes free."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def moved(self, block_ids: BlockIds, old: BlockState, new: BlockState) -> None:
        del old
        if new is BlockState.FREE:
            self._pool.fill(block_ids.tolist(), 0xFF)


@dataclass
class Sequence:
    """What a worker knows of a request."""

    owner: Owner
    tokens: list[int]
    run: TokenRun


class Worker:
    """One sequence at a time, with everything that windows touch: cache, fences and pruning."""

    def __init__(self, model: PagedModel) -> None:
        model.kv_pool.fill(range(NUM_BLOCKS), 0xFF)
        self.blocks = BlockManager(
            model.kv_pool.layout,
            NUM_BLOCKS,
            fences=True,
            prefix_caching=True,
            observers=[PoisonFree(model.kv_pool)],
        )
        self._runner = ModelRunner(model, max_num_seqs=1)

    def admit(self, name: str, tokens: list[int]) -> Sequence:
        run = TokenRun(namespace_of(fingerprint="m"), BLOCK_SIZE, tokens)
        sequence = Sequence((RequestId(name), Attempt(1)), [*tokens], run)
        cached = self.blocks.count_cached_tokens(run, len(tokens) - 1)
        self.blocks.admit(
            sequence.owner, tokens=run, num_cached_tokens=cached, num_tokens=len(tokens)
        )
        opening = (SlotOpening(Slot(0), GREEDY, tokens),)
        for first in range(cached, len(tokens), CHUNK):
            part = tokens[first : first + CHUNK]
            self._step(sequence, part, first, opening if first == cached else ())
        return sequence

    def decode(self, sequence: Sequence, count: int) -> None:
        for _ in range(count):
            at = len(sequence.tokens) - 1
            self.blocks.grow(sequence.owner, at + 1)
            self._step(sequence, [sequence.tokens[at]], at, ())

    def preempt(self, sequence: Sequence) -> Sequence:
        self.blocks.release(sequence.owner)
        return self.admit(sequence.owner[0], sequence.tokens)

    def _step(
        self, sequence: Sequence, part: list[int], at: int, openings: tuple[SlotOpening, ...]
    ) -> None:
        step = self.blocks.dispatch_step([sequence.owner])
        end = at + len(part)
        known = len(sequence.tokens)
        inputs = SequenceInput(
            slot=Slot(0),
            token_ids=part,
            position=at,
            block_tables=self.blocks.block_tables(sequence.owner),
            sample=end == known,
        )
        output = self._runner.run(StepBatch(step=step, openings=openings, sequences=(inputs,)))
        self.blocks.complete_step(step)
        self.blocks.settle(sequence.owner, end)
        for token in output.tokens:
            sequence.tokens.append(token.token_id)
            sequence.run.extend([token.token_id])


def dense_masks(model: PagedModel, num_heads: int, length: int) -> list[torch.Tensor]:
    """Return per layer what each query head may see, as ``transformers`` adds it to scores."""
    masks: list[torch.Tensor] = []
    for layer in model.spec.layers:
        visible = visible_by_head(layer, length)
        visible = visible.repeat_interleave(num_heads // layer.num_kv_heads, dim=0)
        masks.append(torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None])
    return masks


@torch.inference_mode()
def expected_text(folder: Path, model: PagedModel, prompt: list[int], count: int) -> list[int]:
    reference: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    masks: list[torch.Tensor] = []
    for index, layer in enumerate(reference.model.layers):
        layer.self_attn.register_forward_pre_hook(
            lambda _module, args, kwargs, index=index: (
                args,
                {**kwargs, "attention_mask": masks[index]},
            ),
            with_kwargs=True,
        )
    tokens = [*prompt]
    for _ in range(count):
        masks[:] = dense_masks(model, reference.config.num_attention_heads, len(tokens))
        logits = reference(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens


CASES: list[Any] = [
    ("llama", HeadWindowConfig(window=24, sink=4, ratio=0.67)),
    ("llama", HeadWindowConfig(window=13, sink=0, heads=(1,))),
    ("llama", HeadWindowConfig(window=9, sink=2, ratio=1)),
    ("gemma2", HeadWindowConfig(window=11, sink=9, ratio=0.5)),
    ("gpt_oss", HeadWindowConfig(window=20, sink=1, heads=(1,))),
]


@pytest.mark.parametrize("attention", ["reference", "native"])
@pytest.mark.parametrize(("family", "window"), CASES)
def test_paged_and_pruned_text_is_that_of_a_mask_per_head(
    folders: dict[str, Path], family: str, window: HeadWindowConfig, attention: str
) -> None:
    model = load(folders[family], window, attention)
    worker = Worker(model)
    prompt = np.random.default_rng(4).integers(3, 512, 96).tolist()

    # A sequence that is preempted in the middle of its text, and resumes on what is cached of it
    first = worker.admit("first", prompt)
    worker.decode(first, NUM_OUTPUTS // 2)
    hits_before = worker.blocks.stats.hit_tokens
    first = worker.preempt(first)
    assert worker.blocks.stats.hit_tokens > hits_before
    worker.decode(first, NUM_OUTPUTS - len(first.tokens) + len(prompt))

    # One that shares most of the prompt while the first still runs, its windows behind it
    hits_before = worker.blocks.stats.hit_tokens
    second = worker.admit("second", [*prompt[:88], *range(40, 60)])
    assert worker.blocks.stats.hit_tokens == hits_before + 88
    worker.decode(second, 5)

    assert worker.blocks.stats.pruned_blocks > 0
    for text, length in ((first.tokens, len(prompt)), (second.tokens, 108)):
        expected = expected_text(folders[family], model, text[:length], len(text) - length)
        assert text == expected
    worker.blocks.check_invariants()


def test_layers_stay_compiled_and_tell_heads_apart(folders: dict[str, Path]) -> None:
    model = load(folders["llama"], HeadWindowConfig(window=24, sink=4, heads=(0, 2)))

    layers = model._module.model.layers
    assert {type(layer) for layer in layers} <= {LayerRun, AbsorbedLayer}
    groups = model.kv_pool.layout.groups
    assert [(group.heads, group.window, group.num_sinks) for group in groups] == [
        ((0,), 24, 4),
        ((2,), 24, 4),
        ((1,), None, 0),
    ]
    assert {group.layers for group in groups} == {(0, 1, 2)}


@pytest.mark.parametrize("num_sinks", [0, 4, 70])
def test_logits_do_not_depend_on_how_a_prompt_is_cut_into_chunks(
    folders: dict[str, Path], num_sinks: int
) -> None:
    """Bit for bit: which tokens a chunk's rows see together must not show in any row."""
    model = load(folders["llama"], HeadWindowConfig(window=24, sink=num_sinks, ratio=0.67))
    token_ids = np.random.default_rng(1).integers(3, 512, size=200).tolist()
    groups = model.kv_pool.layout.groups
    tables = tuple(np.array_split(np.arange(NUM_BLOCKS, dtype=np.int32), len(groups)))

    def last_logits(chunk: int) -> torch.Tensor:
        logits = torch.empty(0)
        for first in range(0, len(token_ids), chunk):
            part = token_ids[first : first + chunk]
            inputs = SequenceInput(Slot(0), part, first, tables, sample=True)
            logits = model.forward(build_plan([inputs], model.kv_pool.layout, device=model.device))
        return logits

    whole = last_logits(200)
    for chunk in (1, 7, 64, 149):
        assert torch.equal(whole, last_logits(chunk)), chunk


def test_g15_without_a_head_window_the_layout_is_the_plain_one(folders: dict[str, Path]) -> None:
    plain = load(folders["llama"], None).kv_pool.layout

    assert load(folders["llama"], HeadWindowConfig(window=8, ratio=0)).kv_pool.layout == plain
    assert [group.heads for group in plain.groups] == [None]


def test_the_config_reaches_the_layout_of_a_worker(folders: dict[str, Path]) -> None:
    config = SluiceConfig.parse(
        {
            "model": {"dtype": "float32", "device": "cpu"},
            "cache": {"num_blocks": 60},
            "engine": {"num_threads": 1},
            "kv_groups": {"head_window": {"window": 24, "sink": 4, "heads": [1]}},
        },
        source="test",
    )

    layout = start_engine(folders["llama"], config).layout

    assert [(group.heads, group.window) for group in layout.groups] == [
        ((0,), None),
        ((2,), None),
        ((1,), 24),
    ]


@pytest.mark.parametrize(
    ("window", "complaint"),
    [
        ({"heads": (1, 3)}, r"kv_groups\.head_window\.heads=\[1, 3\]: the model has 3 KV heads"),
        ({"ratio": 0.1}, r"kv_groups\.head_window\.ratio=0\.1: selects none .* at least 0\.167"),
    ],
)
def test_a_head_window_that_fits_no_head_is_refused(
    folders: dict[str, Path], window: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(folders["llama"], HeadWindowConfig(window=8, **window))


def test_a_head_window_on_a_model_of_windows_only_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model("mistral", tmp_path / "mistral")

    with pytest.raises(ConfigError, match="every layer of the model has a window"):
        load(folder, HeadWindowConfig(window=8, ratio=0.5))
