"""What all messages have in common."""

from typing import Literal

import msgspec

PROTOCOL_VERSION = 2

Role = Literal["prefill", "decode"]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages: tagged with the class name."""
