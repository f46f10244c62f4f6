"""Per-slot state under reuse and growth, against lists of tokens that are kept in Python."""

from collections import Counter

import numpy as np
import pytest
import torch

from core.errors import InternalError
from core.ids import Slot
from core.sampling import SamplingParams
from engine.batch import SlotOpening
from engine.sampler import sample
from engine.slots import SlotTable

CPU = torch.device("cpu")
VOCAB = 97
NUM_SLOTS = 11
PENALISED = SamplingParams(
    seed=1,
    max_tokens=9999,
    temperature=0.0,
    repetition_penalty=1.25,
    presence_penalty=0.5,
    frequency_penalty=0.125,
)
PLAIN = SamplingParams(seed=1, max_tokens=9999, temperature=0.0)


def table() -> SlotTable:
    return SlotTable(num_slots=NUM_SLOTS, vocab_size=VOCAB, device=CPU)


def expected_logits(logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
    expected = logits.clone()
    counts = Counter(output)
    for token in {*prompt, *output}:
        value = expected[token]
        expected[token] = value / 1.25 if value > 0 else value * 1.25
        expected[token] -= 0.125 * counts[token] + 0.5 * (counts[token] > 0)
    return expected


def test_penalties_follow_the_tokens_while_slots_open_close_and_grow() -> None:
    """Longer than the first allocation, more slots than it has rows, and slots change hands."""
    random = np.random.default_rng(4)
    slots = table()
    texts: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
    for step in range(300):
        if step < 40 or step % 25 == 0:
            slot = int(random.integers(NUM_SLOTS))
            sampling = PENALISED if random.random() < 0.8 else PLAIN
            prompt = random.integers(0, VOCAB, int(random.integers(1, 400))).tolist()
            output = random.integers(0, VOCAB, int(random.integers(0, 300))).tolist()
            slots.open(SlotOpening(Slot(slot), sampling, prompt, output))
            texts[slot] = (sampling, prompt, output)
        live = random.permutation(list(texts))[:6]
        positions = np.array([len(texts[slot][1]) + len(texts[slot][2]) for slot in live])
        logits = torch.randn((len(live), VOCAB), generator=torch.Generator().manual_seed(step))
        rows = slots.rows(live, positions)
        changed = logits.clone()
        tokens = sample(changed, rows, slots.history)
        slots.record(torch.from_numpy(live), rows, tokens)
        for row, slot in enumerate(live.tolist()):
            (sampling, prompt, output) = texts[slot]
            expected = logits[row]
            if sampling is PENALISED:
                expected = expected_logits(expected, prompt, output)
            torch.testing.assert_close(changed[row], expected)
            output.append(int(tokens[row]))
            assert slots.last_tokens[slot] == output[-1]
    assert slots.history.num_open == sum(text[0] is PENALISED for text in texts.values())


def test_nothing_is_kept_of_tokens_without_penalties() -> None:
    slots = table()
    for slot in range(NUM_SLOTS):
        slots.open(SlotOpening(Slot(slot), PLAIN, [1, 2, 3]))
    assert slots.history.num_open == 0
    slots.open(SlotOpening(Slot(0), PENALISED, [1]))
    assert slots.history.num_open == 1
    slots.open(SlotOpening(Slot(0), PLAIN, [1]))
    assert slots.history.num_open == 0


def test_a_slot_that_opens_in_the_middle_of_a_text_knows_its_last_token() -> None:
    slots = table()
    slots.open(SlotOpening(Slot(2), PLAIN, [1, 2], [5, 6]))
    slots.open(SlotOpening(Slot(3), PLAIN, [1, 2]))
    assert slots.last_tokens[2:4].tolist() == [6, 2]


@pytest.mark.parametrize(("slot", "prompt"), [(-1, [1]), (NUM_SLOTS, [1]), (0, [])])
def test_an_opening_that_cannot_be_is_refused(slot: int, prompt: list[int]) -> None:
    with pytest.raises(InternalError, match=f"slot {slot} "):
        table().open(SlotOpening(Slot(slot), PLAIN, prompt))
