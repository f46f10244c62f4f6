"""Reads metrics while what they are read of changes, as the metrics server's thread does.

The server reads between any two instructions of the loop that owns the state. A test with two
threads meets the bad one rarely, so here there is one thread: the change is made between two
instructions of the reader, at every one of them in turn.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

PACKAGES = ("/core/", "/blockmgr/", "/transfer/", "/prefill/", "/decode/")


def scrape(registry: CollectorRegistry, change: Callable[[], object]) -> str:
    """Return what a scrape answers while ``change`` is called at every instruction of ours."""

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        del event, arg
        if not any(package in frame.f_code.co_filename for package in PACKAGES):
            return None
        frame.f_trace_opcodes = True
        return at_instruction

    def at_instruction(frame: FrameType, event: str, arg: object) -> Any:
        del frame, arg
        if event == "opcode":
            change()
        return at_instruction

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        return generate_latest(registry).decode()
    finally:
        sys.settrace(before)
