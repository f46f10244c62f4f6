"""A pair that cannot be is told once, as what it is, and costs requests nothing but the answer.

The failure guarded against: a log full of lost sources and teardowns where two workers were given
different settings, and a handshake for every request that ends like the one before.
"""

import asyncio
import logging
from dataclasses import dataclass, field

import pytest

from core.channel import ClientId, DeploymentKeys, ServerChannel
from core.ids import Attempt, Incarnation, Owner, RequestId, WorkerId
from core.messages import AnyMessage, Hello, Prefill, PrefillPeer, Refused, Welcome
from core.sampling import SamplingParams
from decode.refusals import MAX_KEPT, STANDS_S, Refusals
from decode.sources import Source, Sources

P = Incarnation("P-1")
REASON = "peers cannot exchange KV: kv_layout.block_size: decode 32, prefill 16"


def test_a_refusal_stands_for_a_while_and_is_news_once() -> None:
    refusals = Refusals()
    assert refusals.reason(P, 0.0) is None
    assert refusals.add(P, "a", 0.0)
    assert refusals.reason(P, STANDS_S - 0.1) == "a"
    assert refusals.reason(P, STANDS_S) is None
    assert not refusals.add(P, "a", STANDS_S)
    assert refusals.reason(P, STANDS_S) == "a"
    assert refusals.add(P, "b", STANDS_S)


def test_refusals_of_a_lasting_fleet_are_bounded() -> None:
    refusals = Refusals()
    for life in range(MAX_KEPT + 1):
        refusals.add(Incarnation(f"P-{life}"), "a", 0.0)
    assert refusals.reason(Incarnation("P-0"), 0.0) is None
    assert refusals.reason(Incarnation("P-1"), 0.0) == "a"


@dataclass
class Told:
    """What the sources have told."""

    lost_owners: asyncio.Queue[Owner] = field(default_factory=asyncio.Queue[Owner])

    def paired(self, source: Source, welcome: Welcome, *, seconds: float) -> None:
        raise AssertionError(source, welcome, seconds)

    def is_in_use(self, incarnation: Incarnation) -> bool:
        raise AssertionError(incarnation)

    def asking(self, source: Source, message: Prefill) -> None:
        raise AssertionError(source, message)

    def received(self, source: Source, message: AnyMessage) -> None:
        raise AssertionError(source, message)

    def refused(self, owner: Owner, peer: PrefillPeer, reason: str) -> None:
        assert (peer.incarnation, REASON in reason) == (P, True)
        self.lost_owners.put_nowait(owner)

    def lost(self, source: Source, reason: str) -> None:
        assert REASON in reason
        for owner in source.queued:
            self.lost_owners.put_nowait(owner)


def prefill(name: str) -> Prefill:
    return Prefill(
        request_id=RequestId(name),
        attempt=Attempt(1),
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(seed=1, max_tokens=1),
    )


async def test_requests_to_a_worker_that_refuses_ask_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hellos: list[Hello] = []

    def refuse(_client: ClientId, hello: Hello) -> Refused:
        hellos.append(hello)
        return Refused(reason=REASON)

    keys, told = DeploymentKeys.generate(), Told()
    server = ServerChannel(host="127.0.0.1", keys=keys.of("prefill"), incarnation=P, welcome=refuse)
    answering = asyncio.create_task(server.receive())
    sources = Sources(keys.of("decode"), Hello(name="D", incarnation=Incarnation("D")), told)
    peer = PrefillPeer(WorkerId("P"), P, server.address)
    try:
        with caplog.at_level(logging.INFO, "decode"):
            for name in ("a", "b", "c"):
                sources.ask(peer, prefill(name))
                async with asyncio.timeout(10):
                    assert await told.lost_owners.get() == (name, 1)
        assert len(hellos) == 1
        (line,) = (record for record in caplog.records if record.name.startswith("decode"))
        assert line.getMessage().startswith("event=refused source=P reason=")
        assert REASON in line.getMessage()
    finally:
        sources.close()
        answering.cancel()
        server.close()
