"""What all messages have in common."""

from typing import Literal

import msgspec

PROTOCOL_VERSION = 4
"""Raised with every change of a message: see ``tests/core/test_protocol_version.py``."""

Role = Literal["prefill", "decode"]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages: tagged with the class name."""
