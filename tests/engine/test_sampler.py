"""The choice of tokens, whose failures change users' text silently.

A row that depends on its batch, a filter that keeps the wrong tokens, a random number that changes
when a request moves.
"""

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core.ids import Slot
from core.sampling import SamplingParams
from engine.batch import SlotOpening
from engine.counter_random import uniforms
from engine.logprobs import copy_raw, logprobs_of, to_values
from engine.sampler import sample
from engine.slots import SlotTable

CPU = torch.device("cpu")
VOCAB = 1000
PROMPT = (3, 5, 3, 7)


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**({"seed": 1, "max_tokens": 100} | changes))


def logits_of(num_rows: int, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn((num_rows, vocab), generator=generator) * scale


def sample_rows(
    logits: torch.Tensor, each: list[SamplingParams], outputs: tuple[int, ...] = ()
) -> list[int]:
    """Sample the token after ``PROMPT`` and ``outputs``, row by row with its own parameters."""
    slots = SlotTable(num_slots=len(each), vocab_size=logits.shape[1], device=CPU)
    for slot, sampling in enumerate(each):
        slots.open(SlotOpening(Slot(slot), sampling, PROMPT, outputs))
    positions = np.full(len(each), len(PROMPT) + len(outputs))
    rows = slots.rows(np.arange(len(each)), positions)
    return sample(logits.clone(), rows, slots.history).tolist()


def drawn(logits: torch.Tensor, sampling: SamplingParams, count: int) -> torch.Tensor:
    """Return how often each token is chosen by ``count`` seeds."""
    each = [params(**_fields(sampling) | {"seed": seed}) for seed in range(count)]
    tokens = sample_rows(logits.expand(count, -1), each)
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1])


def _fields(sampling: SamplingParams) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def reference_probs(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return the distribution that ``transformers`` would draw from, for one row."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None])
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores.softmax(-1)[0]


MIXED = [
    params(temperature=0.0),
    params(temperature=0.7, seed=11),
    params(top_k=5, seed=12),
    params(top_p=0.9, seed=13),
    params(top_p=0.999, temperature=2.0, seed=14),
    params(min_p=0.05, seed=15),
    params(top_k=50, top_p=0.8, min_p=0.01, temperature=1.3, seed=16),
    params(temperature=0.0, repetition_penalty=1.8),
    params(presence_penalty=1.5, frequency_penalty=0.5, seed=17),
    params(temperature=0.0, min_tokens=9, stop_token_ids=(4, 6)),
    params(top_k=600, seed=18),
]

FILTERS = [
    params(),
    params(temperature=0.3),
    params(temperature=1.9),
    params(top_k=1),
    params(top_k=17),
    params(top_k=900),
    params(top_k=5000),
    params(top_p=0.1),
    params(top_p=0.9),
    params(top_p=0.9999, temperature=2.0),
    params(min_p=0.2),
    params(min_p=1.0),
    params(top_k=40, top_p=0.7, min_p=0.05, temperature=0.8),
    params(top_k=400, top_p=0.5),
]


def test_greedy_takes_the_likeliest_token() -> None:
    logits = logits_of(8)
    assert sample_rows(logits, [params(temperature=0.0)] * 8) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-40, 1e-9, 1e-6])
def test_a_temperature_near_zero_is_greedy_and_not_an_overflow(temperature: float) -> None:
    logits = logits_of(4, scale=30.0)
    assert sample_rows(logits, [params(temperature=temperature)] * 4) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("sampling", FILTERS)
def test_draws_follow_the_distribution_of_transformers(sampling: SamplingParams) -> None:
    logits = logits_of(1, scale=1.5)[0]
    expected = reference_probs(logits, sampling).double()
    count = 4000

    counts = drawn(logits, sampling, count)

    assert (counts[expected == 0] == 0).all(), "a filtered token was drawn"
    # Chi-square over bins of at least 5 expected draws; the rest together is one bin.
    large = expected * count >= 5
    observed = torch.cat([counts[large].double(), counts[~large].sum()[None].double()])
    wanted = torch.cat([expected[large] * count, (expected[~large].sum() * count)[None]])
    (observed, wanted) = (observed[wanted > 1e-9], wanted[wanted > 1e-9])
    chi_square = ((observed - wanted) ** 2 / wanted).sum().item()
    freedom = max(len(wanted) - 1, 1)
    assert chi_square < freedom + 4.5 * (2 * freedom) ** 0.5 + 1e-9


@pytest.mark.parametrize("sampling", FILTERS)
def test_filters_keep_exactly_the_tokens_that_transformers_keeps(sampling: SamplingParams) -> None:
    """Flat enough that with enough draws every kept token appears."""
    logits = logits_of(1, vocab=60, scale=0.5)[0]
    sampling = params(**_fields(sampling) | {"temperature": 1.0})
    kept = reference_probs(logits, sampling) > 0
    assert torch.equal(drawn(logits, sampling, 6000) > 0, kept)


def test_top_p_needs_more_candidates_than_the_first_look() -> None:
    """A flat distribution over a large vocabulary: the nucleus ends far behind the first look."""
    logits = logits_of(1, vocab=20_000, scale=0.1)[0]
    sampling = params(top_p=0.5)
    kept = reference_probs(logits, sampling) > 0
    counts = drawn(logits, sampling, 500)
    assert (counts[~kept] == 0).all()
    assert (counts > 0).sum() > 400


def test_min_p_and_top_k_keep_all_tokens_of_a_tie() -> None:
    logits = torch.tensor([2.0, 1.0, 2.0, 1.0, 2.0, -9.0])
    assert (drawn(logits, params(top_k=2), 300) > 0).tolist() == [True, False] * 2 + [True, False]


@pytest.mark.parametrize("row", range(len(MIXED)))
def test_a_row_alone_gives_what_it_gives_in_a_mixed_batch(row: int) -> None:
    logits = logits_of(len(MIXED))
    outputs = (9, 9, 4)
    together = sample_rows(logits, MIXED, outputs)
    assert sample_rows(logits[row : row + 1], [MIXED[row]], outputs) == [together[row]]
    reversed_batch = sample_rows(logits.flip(0), MIXED[::-1], outputs)
    assert reversed_batch[::-1][row] == together[row]


def test_repetition_penalty_equals_that_of_transformers() -> None:
    outputs = (8, 8, 2)
    logits = logits_of(1)
    logits[0, torch.tensor(PROMPT + outputs)] += 12.0
    logits[0, 500] = -0.5
    expected = RepetitionPenaltyLogitsProcessor(1.4)(
        torch.tensor([PROMPT + outputs]), logits.clone()
    )
    slots = SlotTable(num_slots=1, vocab_size=VOCAB, device=CPU)
    greedy = params(temperature=0.0, repetition_penalty=1.4)
    slots.open(SlotOpening(Slot(0), greedy, PROMPT, outputs))
    rows = slots.rows(np.array([0]), np.array([len(PROMPT + outputs)]))
    sample(logits, rows, slots.history)
    torch.testing.assert_close(logits, expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    outputs = (8, 8, 8, 2)
    logits = torch.zeros((1, VOCAB))
    expected = logits.clone()
    expected[0, 8] = -0.5 - 3 * 0.25
    expected[0, 2] = -0.5 - 0.25
    slots = SlotTable(num_slots=1, vocab_size=VOCAB, device=CPU)
    greedy = params(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    slots.open(SlotOpening(Slot(0), greedy, PROMPT, outputs))
    rows = slots.rows(np.array([0]), np.array([len(PROMPT + outputs)]))
    sample(logits, rows, slots.history)
    torch.testing.assert_close(logits, expected)


def test_stop_tokens_cannot_be_sampled_before_min_tokens() -> None:
    logits = torch.zeros((1, VOCAB))
    logits[0, [4, 6, 8]] = torch.tensor([9.0, 8.0, 7.0])
    sampling = params(temperature=0.0, min_tokens=2, stop_token_ids=(4, 6, VOCAB + 5))
    assert sample_rows(logits, [sampling], ()) == [8]
    assert sample_rows(logits, [sampling], (1,)) == [8]
    assert sample_rows(logits, [sampling], (1, 1)) == [4]


def test_the_largest_random_number_draws_no_excluded_token() -> None:
    """Rounding up to the whole mass would step past the last token that a filter kept."""
    logits = logits_of(1)
    slots = SlotTable(num_slots=1, vocab_size=VOCAB, device=CPU)
    slots.open(SlotOpening(Slot(0), params(top_k=3), PROMPT))
    rows = slots.rows(np.array([0]), np.array([4]))
    rows.uniform[0] = 1.0 - 2.0**-53
    token = sample(logits.clone(), rows, slots.history).item()
    assert token == logits.topk(3).indices.max().item()


def test_random_numbers_depend_on_seed_and_position_alone() -> None:
    seeds = np.array([1, 2, 1, 0xFFFF_FFFF_FFFF_FFFF], np.uint64)
    positions = np.array([7, 7, 8, 7])
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[at : at + 1], positions[at : at + 1])[0] for at in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4
    # Recorded: a change would change every seeded text.
    assert alone[0] == pytest.approx(0.18594545577485155, abs=1e-15)


def test_random_numbers_are_uniform_along_positions_and_along_seeds() -> None:
    counting = np.arange(20_000)
    fixed = np.zeros(20_000, np.int64)
    for numbers in (
        uniforms(fixed.astype(np.uint64), counting),
        uniforms(counting.astype(np.uint64), fixed),
    ):
        observed = np.histogram(numbers, bins=100, range=(0, 1))[0]
        assert ((observed - 200) ** 2 / 200).sum() < 99 + 4.5 * 198**0.5
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_streams_of_seeds_that_differ_by_the_increment_are_not_shifted_copies() -> None:
    gamma = 0x9E3779B97F4A7C15
    positions = np.arange(100)
    one = uniforms(np.full(100, 5, np.uint64), positions)
    other = uniforms(np.full(100, 5 + gamma, np.uint64), positions)
    assert not np.isin(one, other).any()


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = logits_of(3)
    expected = logits.log_softmax(-1)
    raw = copy_raw(logits, np.array([0, 2]), np.array([0, 4]))
    logits.zero_()  # the sampler overwrites them
    tokens = torch.tensor([17, 18, 19])

    (first, second) = to_values(logprobs_of(raw, tokens))

    assert first.chosen == pytest.approx(expected[0, 17].item(), abs=1e-5)
    assert first.top == ()
    assert second.chosen == pytest.approx(expected[2, 19].item(), abs=1e-5)
    (values, ids) = expected[2].topk(4)
    assert [token for token, _ in second.top] == ids.tolist()
    assert [value for _, value in second.top] == pytest.approx(values.tolist(), abs=1e-5)
