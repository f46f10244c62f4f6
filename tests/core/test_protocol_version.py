"""What is on the wire changes with ``PROTOCOL_VERSION`` alone.

The failure guarded against: a new message, field or value under an old version. Its peers take the
connection, find it unreadable, lose it, and connect again, for ever; a version that differs is one
refusal that says what to do.
"""

import hashlib
import json
from typing import Any, cast

import msgspec
import pytest

from core.errors import TransferError
from core.ids import Attempt, Incarnation, RequestId
from core.messages import PROTOCOL_VERSION, Failed, Hello, decode, encode
from tests.core.message_strategies import MESSAGE_TYPES

WIRE = {7: "62b3390d3fd2f3da"}
"""Digest of all messages by version."""


def bare(schema: object) -> object:
    """Leave out what is for people."""
    if isinstance(schema, list):
        return [bare(part) for part in cast("list[object]", schema)]
    if isinstance(schema, dict):
        parts = cast("dict[str, Any]", schema)
        return {key: bare(part) for key, part in parts.items() if key != "description"}
    return schema


def test_h09_another_wire_is_another_version() -> None:
    schemas = msgspec.json.schema_components(MESSAGE_TYPES)
    text = json.dumps(bare(list(schemas)), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    told = "raise PROTOCOL_VERSION, and enter the digest here under the new version"
    assert {PROTOCOL_VERSION: digest} == WIRE, told


def test_h09_hello_and_refused_are_readable_whatever_else_a_version_brings() -> None:
    """A refusal needs both sides to read these two."""
    hello = msgspec.to_builtins(Hello(name="x", incarnation=Incarnation("i"), protocol_version=9))
    assert decode(msgspec.msgpack.encode(hello | {"new": 1})) == Hello(
        name="x", incarnation=Incarnation("i"), protocol_version=9
    )
    refused = {"type": "Refused", "reason": "protocol version 2", "new": 1}
    assert decode(msgspec.msgpack.encode(refused))


def test_h09_a_value_of_a_later_version_is_unreadable_to_an_earlier_one() -> None:
    failed = Failed(RequestId("r"), Attempt(1), reason="drains", kind="draining")
    later = msgspec.msgpack.decode(encode(failed)) | {"kind": "of a later version"}
    with pytest.raises(TransferError, match="unreadable"):
        decode(msgspec.msgpack.encode(later))
