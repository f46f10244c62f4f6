"""A model in parts must be the same model: a head or a column too few gives plausible, wrong text.

Ranks are threads here, joined by the same collectives as processes are.
"""

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
)

from core.errors import ConfigError, InternalError
from engine.attention import PagedAttention
from engine.forward import PagedModel
from engine.plan import ForwardPlan
from engine.rank_group import COLLECTIVE_TIMEOUT_S, RankGroup, RankPlace
from engine.runner import ModelRunner
from engine.tensor_parallel import RowwiseLinear, shard_model
from tests.engine.mixed_batches import expected_logits, random_sequences, run_in_parts
from tests.engine.rank_threads import load_ranks, on_all_ranks
from tests.engine.texts import GREEDY, SEEDED, batches, generated, ids, prompts, run, text
from tests.engine.tiny_models import make_tiny_model

SPLIT_FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral")
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class _Rank:
    """Gives ``run_in_parts`` as many rows on a rank that does not sample."""

    def __init__(self, model: PagedModel) -> None:
        self._model = model
        self.kv_pool, self.device, self.spec = model.kv_pool, model.device, model.spec

    def forward(self, plan: ForwardPlan) -> torch.Tensor:
        logits = self._model.forward(plan)
        return logits if len(logits) else logits.new_zeros(len(plan.sample_rows), logits.shape[1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(family, root / family) for family in SPLIT_FAMILIES}


@pytest.mark.parametrize("attention", ["reference", "native"])
@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_two_ranks_give_the_logits_of_transformers(
    folders: dict[str, Path], tmp_path: Path, family: str, attention: str
) -> None:
    models = load_ranks(folders[family], tmp_path / "store", num_ranks=2, attention=attention)
    sequences = random_sequences(models[0].spec.vocab_size)

    (results, _) = on_all_ranks(2, lambda rank: run_in_parts(_Rank(models[rank]), sequences))

    expected = expected_logits(folders[family], torch.float32)
    assert len(results) > 20
    for sequence, position, logits in results:
        torch.testing.assert_close(logits, expected[sequence][position], rtol=1e-4, atol=1e-3)


def test_greedy_and_seeded_text_is_that_of_one_rank(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Four ranks: two copies of each of the two KV heads."""
    seen: dict[str, list[int]] = {}

    def run_ranks(num_ranks: int) -> list[list[list[int]]]:
        models = load_ranks(
            folders["qwen2"], tmp_path / f"{num_ranks}", num_ranks=num_ranks, num_blocks=96
        )
        (first, second) = prompts(models[0], (40, 9))
        seen.update(first=first)

        def run_rank(rank: int) -> list[list[int]]:
            texts = [text(0, first, GREEDY), text(1, second, SEEDED)]
            return [ids(tokens) for tokens in run(models[rank], texts, depth=2)]

        return on_all_ranks(num_ranks, run_rank)

    (alone,) = run_ranks(1)
    reference = AutoModelForCausalLM.from_pretrained(folders["qwen2"], dtype=torch.float32)
    assert alone[0] == generated(reference, seen["first"], count=len(alone[0]))
    # Every rank knows what the leader has sampled.
    assert run_ranks(2) == [alone] * 2
    assert run_ranks(4) == [alone] * 4


class _Late:
    """Attention of a rank that is slower than the others."""

    def __init__(self, attention: PagedAttention) -> None:
        self._attention = attention

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.02)
        return self._attention.attend(*args, **kwargs)


def test_a_layer_that_the_leader_reports_is_written_on_every_rank(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are offered then, of all ranks; a reader would take zeros for KV."""
    models = load_ranks(folders["llama"], tmp_path / "store", num_ranks=2, num_blocks=96)
    late = models[1]._attention
    monkeypatch.setattr(models[1], "_attention", lambda plan: _Late(late(plan)))
    (prompt,) = prompts(models[0], (8,))
    batch = next(batches([text(0, prompt, GREEDY)], chunk=8, count=1))
    written: dict[int, bool] = {}

    def look(layer: int) -> None:
        written[layer] = bool(models[1].kv_pool.keys[layer][0].abs().sum(dim=(1, 2)).all())

    def run_rank(rank: int) -> None:
        runner = ModelRunner(models[rank], max_num_seqs=2)
        marks = (0, 1, 2, 3) if rank == 0 else ()
        runner.launch(replace(batch, layer_marks=marks), look).wait()

    on_all_ranks(2, run_rank)
    assert written == dict.fromkeys(range(4), True)


def test_c16_ranks_beyond_the_kv_heads_hold_copies_of_one_head(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    models = load_ranks(folders["llama"], tmp_path / "store", num_ranks=4)
    sequences = random_sequences(models[0].spec.vocab_size)

    on_all_ranks(4, lambda rank: run_in_parts(_Rank(models[rank]), sequences))

    pools = [model.kv_pool.blocks for model in models]
    assert {model.kv_pool.layout.num_kv_heads for model in models} == {1}
    assert torch.equal(pools[0], pools[1])
    assert torch.equal(pools[2], pools[3])
    assert not torch.equal(pools[0], pools[2])


def test_g15_every_rank_has_blocks_of_one_shape(folders: dict[str, Path], tmp_path: Path) -> None:
    """Heads per rank are max(1, heads / ranks), so that block ids mean the same everywhere."""
    for num_ranks, num_heads in ((1, 2), (2, 1), (4, 1)):
        models = load_ranks(folders["gemma3"], tmp_path / str(num_ranks), num_ranks=num_ranks)
        (layout, *others) = [model.kv_pool.layout for model in models]
        assert layout.num_kv_heads == num_heads
        assert all(other == layout for other in others)


def test_a_rank_keeps_its_part_of_the_weights_only(folders: dict[str, Path]) -> None:
    whole = AutoModelForCausalLM.from_pretrained(folders["qwen2"])
    part = AutoModelForCausalLM.from_pretrained(folders["qwen2"])
    shard_model(part, num_kv_heads=2, rank=1, num_ranks=2)
    (attention, mlp) = (part.model.layers[0].self_attn, part.model.layers[0].mlp)
    original = whole.model.layers[0].self_attn

    assert torch.equal(attention.k_proj.weight, original.k_proj.weight[16:])
    assert torch.equal(attention.k_proj.bias, original.k_proj.bias[16:])
    assert torch.equal(attention.q_proj.weight, original.q_proj.weight[32:])
    assert torch.equal(attention.o_proj.weight, original.o_proj.weight[:, 32:])
    assert attention.o_proj.weight.untyped_storage().nbytes() == attention.o_proj.weight.nbytes
    assert mlp.gate_proj.weight.shape == (48, 64)
    assert mlp.down_proj.weight.shape == (64, 48)


def test_a_bias_behind_a_sum_is_added_once() -> None:
    linear = torch.nn.Linear(4, 3)
    x = torch.randn(2, 4)
    halves = [RowwiseLinear(linear, slice(0, 2)), RowwiseLinear(linear, slice(2, 4))]
    parts = [half(part) - linear.bias for half, part in zip(halves, x.split(2, 1), strict=True)]
    torch.testing.assert_close(sum(parts) + linear.bias, linear(x))


def _llama(**changes: int) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**TINY, **changes}))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (_llama(intermediate_size=49), r"49 columns of .*gate_proj cannot be split evenly"),
        (_llama(num_attention_heads=2, num_key_value_heads=1), r"2 attention heads cannot"),
        (GPTNeoXForCausalLM(GPTNeoXConfig(**TINY)), r"does not split .*q_proj, k_proj, v_proj"),
        (Olmo2ForCausalLM(Olmo2Config(**TINY)), r"'colwise_gather_output', which is not"),
        (CohereForCausalLM(CohereConfig(**TINY, use_qk_norm=True)), r"says nothing of .*q_norm"),
    ],
    ids=["columns", "heads", "fused", "gathered", "norm_over_heads"],
)
def test_a_model_that_cannot_be_split_is_refused_with_the_fix(
    model: PreTrainedModel, reason: str
) -> None:
    heads = 1 if model.config.model_type == "llama" and "2 attention" in reason else 2
    with pytest.raises(ConfigError, match=reason) as refusal:
        shard_model(model, num_kv_heads=heads, rank=0, num_ranks=4)
    assert model.config.model_type in str(refusal.value)
    assert str(refusal.value).endswith("use tensor_parallel_size: 1")


class _FusedMLP(torch.nn.Module):
    """Gate and up in one projection, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Linear(32, 96, bias=False)
        self.down_proj = torch.nn.Linear(48, 32, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(torch.nn.functional.silu(gate) * up)


def test_a_plan_that_would_mix_up_the_halves_of_a_projection_is_refused() -> None:
    """The shapes fit, the text would look plausible."""
    model: Any = _llama()
    for layer in model.model.layers:
        layer.mlp = _FusedMLP()
    plan = {
        name: style for name, style in model.config.base_model_tp_plan.items() if "attn" in name
    }
    model.config.base_model_tp_plan = plan | {
        "layers.*.mlp.gate_up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    with pytest.raises(ConfigError, match=r"parts of model\.layers\.0\.mlp do not add up to it"):
        shard_model(model, num_kv_heads=2, rank=0, num_ranks=2)


def test_a_projection_with_a_gate_beside_the_heads_is_refused() -> None:
    model: Any = _llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj = torch.nn.Linear(32, 64, bias=False)
    with pytest.raises(ConfigError, match=r"have 64, 16 and 16 columns for 4 heads and 2 KV heads"):
        shard_model(model, num_kv_heads=2, rank=0, num_ranks=2)


def test_a_model_with_attention_sinks_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model("gpt_oss", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ConfigError, match=r"gpt_oss.*use tensor_parallel_size: 1"):
        shard_model(model, num_kv_heads=2, rank=0, num_ranks=2)


def test_kv_heads_that_neither_divide_nor_are_divided_are_refused() -> None:
    """SmolLM2 has three: two ranks would differ in shape."""
    model = _llama(num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: the model's 3 KV heads"):
        shard_model(model, num_kv_heads=3, rank=0, num_ranks=2)


def test_a_rank_that_never_comes_is_an_error_and_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.rank_group.COLLECTIVE_TIMEOUT_S", 0.5)
    with pytest.raises(InternalError, match="rank 0 of 2 cannot join"):
        RankGroup.join(tmp_path / "store", rank=0, size=2, device=torch.device("cpu"))


def test_a_rank_that_fails_ends_the_others_step(folders: dict[str, Path], tmp_path: Path) -> None:
    """The other rank never comes to the next sum: the wait is bounded, and the step fails."""
    models = load_ranks(folders["llama"], tmp_path / "store", num_ranks=2, num_blocks=96)
    assert models[0].group is not None
    process_group = models[0].group._process_group
    assert process_group.options._timeout == timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    # Short from here on: one waits for the other to load, which may take long
    process_group.set_timeout(timedelta(seconds=1))
    runner = ModelRunner(models[0], max_num_seqs=2)
    with pytest.raises(InternalError, match="another rank is lost"):
        runner.warm_up()


@pytest.mark.parametrize(("available", "is_refused"), [(1, True), (2, False)])
def test_each_rank_needs_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch, available: int, *, is_refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: available)

    def place(rank: int) -> RankPlace:
        return RankPlace(rank=rank, num_ranks=2, join=lambda _: pytest.fail("joined"))

    place(0).check_device(torch.device("cpu"))
    place(1).check_device(torch.device("cuda"))  # sees one, its own
    if is_refused:
        with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: .* sees 1 CUDA devices"):
            place(0).check_device(torch.device("cuda"))
    else:
        place(0).check_device(torch.device("cuda"))
