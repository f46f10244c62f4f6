"""Only the right party may talk to a server, by its key, and only as long as the key is good.

Otherwise a stranger drives a worker, or learns from a Welcome where its memory is.
"""

import asyncio
from dataclasses import dataclass

import pytest

from core.channel import (
    ChannelKeys,
    ClientLost,
    DeploymentKeys,
)
from core.channel_keys import ADMITTED_BY, PARTIES, KeyPair, PublicKey
from core.errors import PeerLostError
from core.messages import Party
from tests.core.door import ABORT, POOL, channel, open_door


@dataclass
class MutableKeys:
    """Public keys that a test replaces, as an operator does."""

    keys: dict[Party, tuple[PublicKey, ...]]

    def of(self, party: Party) -> tuple[PublicKey, ...]:
        return self.keys[party]


@pytest.mark.parametrize("server", PARTIES)
async def test_each_server_admits_the_parties_that_have_business_with_it(server: Party) -> None:
    keys = DeploymentKeys.generate()
    async with open_door(keys.of(server)) as door:
        for party in PARTIES:
            client = channel(door, keys.of(party), server, party)
            if party in ADMITTED_BY[server]:
                assert (await client.connect()).pools == (POOL,)
                client.send(ABORT)
                await door.until(lambda: door.events)
                sender, message = door.events.pop()
                assert (message, door.server.party(sender)) == (ABORT, party)
            else:
                with pytest.raises(PeerLostError, match="does not accept our keys"):
                    await client.connect(timeout_s=60)
            client.close()
        assert {hello.name for hello in door.hellos} == set(ADMITTED_BY[server])
        num_refused = len(PARTIES) - len(ADMITTED_BY[server])
        await door.until(lambda: door.server.rejects.counts["key"] >= num_refused)
        assert door.server.rejects.counts["key"] == num_refused


async def test_stranger_who_knows_the_servers_key_learns_nothing() -> None:
    keys = DeploymentKeys.generate()
    async with open_door(keys.of("prefill")) as door:
        stranger = ChannelKeys("decode", KeyPair.generate(), keys.of("decode").public)
        client = channel(door, stranger, "prefill")
        with pytest.raises(PeerLostError):
            await client.connect(timeout_s=60)
        assert not door.hellos
        assert not door.events


async def test_without_the_check_of_keys_a_stranger_is_welcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ChannelKeys, "admits", lambda *_: "decode")
    keys = DeploymentKeys.generate()
    async with open_door(keys.of("prefill")) as door:
        stranger = ChannelKeys("decode", KeyPair.generate(), keys.of("decode").public)
        client = channel(door, stranger, "prefill")
        assert (await client.connect()).pools == (POOL,)
        client.close()


async def test_impostor_without_the_servers_key_hears_no_hello() -> None:
    """A client says nothing, not even who it is, to whoever sits at an old address."""
    keys = DeploymentKeys.generate()
    impostor = ChannelKeys("prefill", KeyPair.generate(), keys.of("prefill").public)
    async with open_door(impostor) as door:
        client = channel(door, keys.of("decode"), "prefill")
        with pytest.raises(PeerLostError):
            await client.connect(timeout_s=60)
        assert not door.hellos


# Rotation


async def test_key_that_is_withdrawn_loses_its_client_and_lets_no_other_in() -> None:
    keys = DeploymentKeys.generate()
    public = MutableKeys({party: keys.of(party).public.of(party) for party in PARTIES})
    old, new = keys.of("decode"), KeyPair.generate()
    server = ChannelKeys("prefill", keys.of("prefill").own, public)
    async with open_door(server) as door:
        # Given a client under the old key, and one under a new key that was added beside it
        first = channel(door, old, "prefill", "first")
        await first.connect()
        public.keys["decode"] = (new.public, old.own.public)
        second = channel(door, ChannelKeys("decode", new, public), "prefill", "second")
        await second.connect()
        # When the old key is withdrawn
        public.keys["decode"] = (new.public,)
        door.server._next_look = 0.0  # at the next message, and not a quarter of a minute later
        # Then its client is lost, on both sides, and cannot come back
        with pytest.raises(PeerLostError, match="not admitted any more"):
            async with asyncio.timeout(60):
                await first.receive()
        await door.until(lambda: [event for _, event in door.events if event == ClientLost()])
        again = channel(door, old, "prefill", "again")
        with pytest.raises(PeerLostError):
            await again.connect(timeout_s=60)
        # While the other goes on
        second.send(ABORT)
        await door.until(lambda: ABORT in [event for _, event in door.events])
        for client in (first, second):
            client.close()


async def test_client_tries_each_key_by_which_the_server_is_known() -> None:
    keys = DeploymentKeys.generate()
    public = MutableKeys({party: keys.of(party).public.of(party) for party in PARTIES})
    public.keys["prefill"] = (KeyPair.generate().public, *public.keys["prefill"])
    async with open_door(keys.of("prefill")) as door:
        client = channel(door, ChannelKeys("decode", keys.of("decode").own, public), "prefill")
        assert (await client.connect()).pools == (POOL,)
        assert len(door.hellos) == 1
        client.close()
