"""A stop string must end the text wherever tokens cut it, and no part of it may ever be shown."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.stop_strings import StopScan, StopStringMatcher


def _run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stops)
    shown = ""
    for piece in pieces:
        scan = matcher.feed(piece)
        shown += scan.text
        if scan.stop is not None:
            return shown, scan.stop
    return shown + matcher.flush(), None


def test_part_of_a_stop_string_is_held_back_until_it_is_decided() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.feed("the E") == StopScan("the ")
    assert matcher.held == "E"
    assert matcher.feed("N") == StopScan("")
    assert matcher.feed("T") == StopScan("ENT")
    assert matcher.feed(" EN") == StopScan(" ")
    assert matcher.feed("D and more") == StopScan("", "END")


def test_held_text_is_shown_where_the_sequence_ends_otherwise() -> None:
    assert _run(["END"], ["the EN"]) == ("the EN", None)


def test_stop_string_completed_first_counts_and_of_equals_the_longest() -> None:
    assert _run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")
    assert _run(["b", "ab"], ["xab"]) == ("x", "ab")


def test_without_stop_strings_text_passes_at_once() -> None:
    assert _run([], ["a", "b"]) == ("ab", None)


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=10),
)
def test_result_does_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    shown, stop = _run(stops, list(text))
    assert _run(stops, pieces) == (shown, stop)
    assert text.startswith(shown)
    assert not any(each in shown for each in stops)
