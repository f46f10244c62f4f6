"""The reader's tables are total: each pair is a transition or is listed as impossible."""

import itertools

import pytest

from core.errors import InvalidTransitionError
from transfer.reader_states import (
    PIECE_TRANSITIONS,
    TRANSITIONS,
    Effect,
    Event,
    PieceEvent,
    PieceState,
    State,
    advance,
    advance_piece,
)

IMPOSSIBLE = {(State.GONE, event) for event in Event}
IMPOSSIBLE_PIECES = {
    (PieceState.ANNOUNCED, PieceEvent.COMPLETED),
    (PieceState.READING, PieceEvent.ALLOCATED),
    (PieceState.LANDED, PieceEvent.ALLOCATED),
    (PieceState.LANDED, PieceEvent.COMPLETED),
}


def test_every_pair_of_a_request_is_decided() -> None:
    assert set(TRANSITIONS) | IMPOSSIBLE == set(itertools.product(State, Event))
    assert not set(TRANSITIONS) & IMPOSSIBLE


def test_every_pair_of_a_piece_is_decided() -> None:
    pairs = set(itertools.product(PieceState, PieceEvent))
    assert set(PIECE_TRANSITIONS) | IMPOSSIBLE_PIECES == pairs
    assert not set(PIECE_TRANSITIONS) & IMPOSSIBLE_PIECES


def test_impossible_pairs_raise() -> None:
    for state, event in IMPOSSIBLE:
        with pytest.raises(InvalidTransitionError):
            advance(state, event)
    for piece_state, piece_event in IMPOSSIBLE_PIECES:
        with pytest.raises(InvalidTransitionError):
            advance_piece(piece_state, piece_event)


def test_a_request_is_delivered_or_failed_or_cancelled_never_two_of_them() -> None:
    for (_, event), (after, effects) in TRANSITIONS.items():
        ends = [effect for effect in effects if effect in {Effect.DELIVER, Effect.FAIL}]
        assert len(ends) <= 1
        assert bool(ends) <= (after is State.GONE)
        if after is State.GONE:
            tells = {Effect.RELEASE, Effect.WITHDRAW} & set(effects)
            assert len(tells) == (event is not Event.SOURCE_LOST), "the source is told once"
