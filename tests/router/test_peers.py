"""Decode workers learn of each prefill worker that comes or goes: pairs are ready in time."""

import itertools

from core.ids import Incarnation
from tests.router.conftest import RunningRouter
from tests.router.scripted_worker import ScriptedWorker, silence


async def until_told(decode: ScriptedWorker, *prefill: Incarnation) -> None:
    """Wait until the last thing that ``decode`` was told is ``prefill``."""

    def is_told() -> bool:
        told = [peer.incarnation for peer in decode.peers[-1].prefill] if decode.peers else None
        return told == list(prefill)

    await decode.wait_for(is_told)


async def test_decode_is_told_of_those_there_are_and_of_each_change(router: RunningRouter) -> None:
    first = await router.start_worker(silence, worker_id="prefill-0", role="prefill")
    decode = await router.start_worker(silence, worker_id="decode-0")
    await until_told(decode, first.incarnation)
    second = await router.start_worker(silence, worker_id="prefill-1", role="prefill")
    await until_told(decode, first.incarnation, second.incarnation)
    # When one dies, and comes again as another process
    await first.die()
    await until_told(decode, second.incarnation)
    again = await router.start_worker(silence, worker_id="prefill-0", role="prefill")
    await until_told(decode, again.incarnation, second.incarnation)
    # Then nothing was said twice in a row
    said = [peers.prefill for peers in decode.peers]
    assert all(one != other for one, other in itertools.pairwise(said))
