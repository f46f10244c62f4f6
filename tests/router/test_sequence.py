"""Text, stops and logprobs of one sequence must not depend on how its tokens were batched."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.ids import Attempt, RequestId
from core.messages import FinishReason, Output
from core.sampling import SamplingParams, TokenLogprobs
from router.sequence import Delta, Sequence, SequenceSpec
from router.tokenizer import Tokenizer
from tests.router.model_folder import EOS

TEXT = "hello \N{SNOWMAN} world STOP and more"


def _sequence(tokenizer: Tokenizer, *, stop: tuple[str, ...] = (), min_tokens: int = 0) -> Sequence:
    sampling = SamplingParams(
        seed=0, max_tokens=100, min_tokens=min_tokens, stop_token_ids=(EOS,), logprobs=0
    )
    return Sequence(SequenceSpec(RequestId("r"), (5,), sampling, stop), tokenizer)


def _output(ids: list[int], finish: FinishReason | None = None) -> Output:
    logprobs = tuple(TokenLogprobs(-float(i)) for i in ids)
    return Output(RequestId("r"), Attempt(1), tuple(ids), logprobs, finish)


def _feed(sequence: Sequence, batches: list[list[int]], finish: FinishReason) -> list[Delta]:
    deltas: list[Delta] = []
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        deltas.append(sequence.feed(_output(batch, finish if last else None)))
        if deltas[-1].finish_reason:
            break
    return deltas


def test_end_token_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    sequence = _sequence(tokenizer)
    ids = tokenizer.encode("hello", add_special_tokens=False)
    deltas = _feed(sequence, [[*ids, EOS]], "stop")
    assert "".join(delta.text for delta in deltas) == "hello"
    assert sequence.token_ids == [*ids, EOS]
    assert [entry.token_id for delta in deltas for entry in delta.entries] == ids


def test_length_finish_shows_held_text(tokenizer: Tokenizer) -> None:
    sequence = _sequence(tokenizer, stop=("lot",))
    ids = tokenizer.encode("hello lo", add_special_tokens=False)
    deltas = _feed(sequence, [ids], "length")
    assert "".join(delta.text for delta in deltas) == "hello lo"
    assert deltas[-1].finish_reason == "length"


def test_tokens_of_the_stop_string_have_no_logprobs(tokenizer: Tokenizer) -> None:
    sequence = _sequence(tokenizer, stop=("STOP",))
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    deltas = _feed(sequence, [[each] for each in ids], "length")
    entries = [entry for delta in deltas for entry in delta.entries]
    shown = b"".join(tokenizer.token_bytes(entry.token_id) for entry in entries).decode()
    assert "".join(delta.text for delta in deltas) == shown == "hello \N{SNOWMAN} world "
    assert sequence.finish_reason == "stop"
    assert len(sequence.token_ids) < len(ids)


def test_stop_strings_do_not_count_before_min_tokens(tokenizer: Tokenizer) -> None:
    sequence = _sequence(tokenizer, stop=("a",), min_tokens=3)
    (token_a,) = tokenizer.encode("a", add_special_tokens=False)
    deltas = _feed(sequence, [[token_a]] * 6, "length")
    assert "".join(delta.text for delta in deltas) == "aaa"
    assert deltas[-1].finish_reason == "stop"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    cuts=st.sets(st.integers(1, 60), max_size=20),
    stop=st.sampled_from([(), ("STOP",), (" wor", "more"), ("\N{SNOWMAN}",), ("zzz",)]),
)
def test_batches_do_not_matter(tokenizer: Tokenizer, cuts: set[int], stop: tuple[str, ...]) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    edges = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    batches = [ids[a:b] for a, b in pairwise(edges)]
    one, many = _sequence(tokenizer, stop=stop), _sequence(tokenizer, stop=stop)
    singly = _feed(one, [[each] for each in ids], "length")
    batched = _feed(many, batches, "length")

    def whole(deltas: list[Delta]) -> tuple[object, ...]:
        return (
            "".join(delta.text for delta in deltas),
            [entry for delta in deltas for entry in delta.entries],
            deltas[-1].finish_reason,
            sum(delta.num_tokens for delta in deltas),
        )

    assert whole(singly) == whole(batched)
    assert one.token_ids == many.token_ids


def test_offsets_point_to_where_the_token_begins(tokenizer: Tokenizer) -> None:
    sequence = _sequence(tokenizer)
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    entries = [e for delta in _feed(sequence, [ids], "length") for e in delta.entries]
    for entry in entries:
        token = tokenizer.token_bytes(entry.token_id).decode()
        assert "hello world"[entry.text_offset :].startswith(token)
    assert entries[0].logprobs.chosen == pytest.approx(-float(ids[0]))
