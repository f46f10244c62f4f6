"""Whatever bytes come, ``decode`` returns a message within its bounds or says that there is none.

It stands before every handler of every worker. Anything else that it raised would end a worker;
anything that it let through would be taken for granted behind it.
"""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import TransferError
from core.messages import Message, decode, encode
from tests.core.message_strategies import MESSAGE_TYPES, messages

few = settings(max_examples=60, deadline=None)
many = settings(max_examples=400, deadline=None)


def read(payload: bytes) -> Message | None:
    """Return the message in ``payload``, if it is one; any other error fails the test."""
    try:
        return decode(payload)
    except TransferError:
        return None


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
@few
@given(data=st.data())
def test_every_message_within_its_bounds_is_read_as_it_was_written(
    kind: type[msgspec.Struct], data: st.DataObject
) -> None:
    message = data.draw(messages(kind))
    assert repr(read(encode(message))) == repr(message)  # NaN is not equal to itself


@many
@given(data=st.data())
def test_damaged_messages_are_messages_or_none(data: st.DataObject) -> None:
    payload = bytearray(encode(data.draw(st.sampled_from(MESSAGE_TYPES).flatmap(messages))))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(payload)))
        match data.draw(st.sampled_from(("flip", "cut", "insert", "repeat"))):
            case "flip" if at < len(payload):
                payload[at] = data.draw(st.integers(0, 255))
            case "cut":
                del payload[at:]
            case "insert":
                payload[at:at] = data.draw(st.binary(max_size=9))
            case _:
                payload[at:at] = payload[at : at + 20]
    read(bytes(payload))


@many
@given(st.binary(max_size=200))
def test_random_bytes_are_messages_or_none(payload: bytes) -> None:
    read(payload)


def _with(kind: type[msgspec.Struct], field: str, value: object) -> bytes:
    """Return a message of ``kind`` as a peer would send it that does not know the bounds."""
    builtins = {
        "Ticket": {
            "request_id": "r",
            "attempt": 1,
            "incarnation": "P",
            "piece": {"first_layer": 0, "last_layer": 0, "chunk": 0},
            "blocks": [],
            "num_tokens": 1,
            "lease_s": 1.0,
        },
        "Generate": {
            "request_id": "r",
            "attempt": 1,
            "prompt_token_ids": [1],
            "sampling": {"seed": 1, "max_tokens": 1},
        },
        "Renewed": {"sequence": 1, "incarnation": "P", "requests": [], "void": [], "lease_s": 1.0},
        "ResetCache": {"number": 1, "epoch": ""},
    }[kind.__name__]
    outer, _, inner = field.partition(".")
    builtins = builtins | {outer: builtins[outer] | {inner: value} if inner else value}
    return msgspec.msgpack.encode({"type": kind.__name__, **builtins})


_KINDS = {kind.__name__: kind for kind in MESSAGE_TYPES}


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        ("Ticket", "lease_s", (math.nan, math.inf, -math.inf, -1.0, 1e300)),
        ("Ticket", "prefill_s", (math.nan, math.inf, -1.0)),
        ("Ticket", "num_tokens", (-1, 2**31, 2**63)),
        ("Ticket", "attempt", (0, -1, 2**40)),
        ("Ticket", "piece.chunk", (-1, 2**20, 2**62)),
        ("Ticket", "piece.last_layer", (-1, 2**40)),
        ("Ticket", "incarnation", ("x" * 65, "x" * 10_000_000)),
        ("Ticket", "request_id", ("x" * 257, b"r", 1, None)),
        ("Renewed", "lease_s", (math.nan, math.inf, -1.0)),
        ("Renewed", "void", ([["r", 1]] * (2**16 + 1), [["r", -1]], [["r"]])),
        ("Generate", "prompt_token_ids", ([-1], [2**31], [1.5], ["1"], [None])),
        ("Generate", "cache_salt", ("x" * 257,)),
        ("Generate", "sampling.temperature", (math.nan, math.inf, -1.0)),
        ("Generate", "sampling.top_p", (math.nan, 0.0, 1.1)),
        ("Generate", "sampling.min_p", (math.nan, -0.1, 1.1)),
        ("Generate", "sampling.repetition_penalty", (math.nan, 0.0, -1.0, math.inf)),
        ("Generate", "sampling.presence_penalty", (math.nan, math.inf)),
        ("Generate", "sampling.max_tokens", (0, -1, 2**31)),
        ("Generate", "sampling.logprobs", (-1, 2**30)),
        ("Generate", "sampling.stop_token_ids", ([-1], [1] * 2000)),
        ("ResetCache", "epoch", ("../../x", "000000000001-a/b", "000000000001-a\n", "x")),
    ],
)
def test_value_beyond_its_bound_makes_no_message(
    kind: str, field: str, values: tuple[object, ...]
) -> None:
    for value in values:
        assert read(_with(_KINDS[kind], field, value)) is None, value


def test_messages_that_these_are_made_of_are_good_ones() -> None:
    for kind, field, value in (
        ("Ticket", "lease_s", 0.0),
        ("Renewed", "lease_s", 1.0),
        ("Generate", "cache_salt", "x"),
        ("ResetCache", "epoch", "000000000001-ab12"),
    ):
        assert type(read(_with(_KINDS[kind], field, value))) is _KINDS[kind]


@pytest.mark.parametrize(
    "payload",
    [
        b"\x82\xa4type\xa8Withdraw\xaarequest_id\xdb\xff\xff\xff\xff",
        b"\x82\xa4type\xa5Renew\xa8requests\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\xa4type\xa4Ping",
        b"\x82\xa4type\xa4Ping\xa1z" + b"\x91" * 10_000_000 + b"\x90",
        b"\x82\xa4type\xa4Ping\xa1z" + b"\x81\xa1a" * 1_000_000 + b"\x90",
    ],
    ids=["text", "array", "map", "arrays in arrays", "maps in maps"],
)
def test_sizes_and_depths_that_are_only_claimed_cost_nothing(payload: bytes) -> None:
    assert read(payload) is None


def test_error_says_what_is_wrong_and_repeats_no_more_than_a_line_of_it() -> None:
    with pytest.raises(TransferError) as caught:
        decode(msgspec.msgpack.encode({"type": "x" * 10_000_000}))
    assert "unreadable message of 10000011 bytes" in str(caught.value)
    assert len(str(caught.value)) < 500
