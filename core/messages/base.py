"""What all messages have in common."""

from typing import Literal, TypeAlias

import msgspec

PROTOCOL_VERSION = 7
"""Raised with every change of a message: see ``tests/core/test_protocol_version.py``."""

Role = Literal["prefill", "decode"]
Party: TypeAlias = Literal["router", Role]
"""Who has an end of a channel: a worker of either role, or a router."""


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages: tagged with the class name."""
