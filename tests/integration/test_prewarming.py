"""A prefill worker that joins is paired with before anybody asks: no request pays for that."""

import time
from pathlib import Path

import pytest

from tests.integration.models import tiny_model
from tests.integration.stack import Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(400)]

PAIRED = 'sluice_kv_connections{role="decode",state="connected"}'
HANDSHAKES = "sluice_kv_handshake_seconds_count"
WAIT_S = 60.0


def wait_for(stack: Stack, *, connected: int, handshakes: int) -> None:
    """Fail unless decode comes to have so many pairs, of so many made."""
    deadline = time.monotonic() + WAIT_S
    while True:
        samples = stack.metrics("decode-0")
        made = sum(value for name, value in samples.items() if name.startswith(HANDSHAKES))
        if (samples[PAIRED], made) == (connected, handshakes):
            return
        assert time.monotonic() < deadline, (samples[PAIRED], made)
        time.sleep(0.1)


def test_h04_d15_pairs_are_made_when_a_worker_joins_and_anew_when_it_restarts(
    tmp_path: Path,
) -> None:
    with Stack.open(
        tiny_model("llama", tmp_path),
        model={"dtype": "float32"},
        cache={"memory_gib": 0.05, "poison": True},
        router={"worker_silence_s": 3.0},
    ) as stack:
        # Given no request at all, the pair is there
        wait_for(stack, connected=1, handshakes=1)
        # When the worker dies, the pair goes; when it comes again, there is a new one
        stack.kill("prefill-0")
        wait_for(stack, connected=0, handshakes=1)
        stack.start("prefill-0")
        stack.wait_ready()
        wait_for(stack, connected=1, handshakes=2)
        for name in ("prefill-0", "decode-0"):
            stack.wait_idle(name)
        assert stack.blocks("decode-0")["cached"] == 0, "a warm-up fills no block"
