"""CURVE keys: which process of a deployment may talk to which.

Each party has a key pair of its own. A server admits the keys of the parties that have business
with it, and no others; a client demands to meet the key of the party that it means to reach. So a
stolen key of a prefill worker opens no prefill worker, and none but one can offer KV.

Source: CURVE per https://rfc.zeromq.org/spec/26/; keys as text per https://rfc.zeromq.org/spec/32/.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, Self, TypeAlias, get_args

import zmq

from core.messages import Party

PublicKey: TypeAlias = bytes
"""40 characters of Z85."""

PARTIES: Final[tuple[Party, ...]] = get_args(Party)
ADMITTED_BY: Final[Mapping[Party, tuple[Party, ...]]] = {
    "router": ("prefill", "decode"),
    "decode": ("router",),
    "prefill": ("decode",),
}
"""Who connects to whom: workers report to the router, the router sends requests to decode workers,
decode workers ask prefill workers for KV."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One party's keys, Z85. The secret one is in no ``repr``, and so in no log."""

    public: PublicKey
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> Self:
        """Return a fresh random pair."""
        return cls(*zmq.curve_keypair())

    @classmethod
    def of_secret(cls, secret: bytes) -> Self:
        """Return the pair of ``secret``, which must be Z85 of 32 bytes."""
        return cls(zmq.curve_public(secret), secret)


class PublicKeys(Protocol):
    """The public keys of a deployment. They may change between calls: keys are rotated."""

    def of(self, party: Party) -> tuple[PublicKey, ...]:
        """Return the keys by which ``party`` is known now; while they are rotated, several."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPublicKeys:
    """One key for each party, for the life of the deployment."""

    keys: Mapping[Party, PublicKey]

    def of(self, party: Party) -> tuple[PublicKey, ...]:
        """See ``PublicKeys``."""
        return (self.keys[party],)


@dataclass(frozen=True, slots=True)
class ChannelKeys:
    """What one process has: its own pair, and the public keys of all."""

    party: Party
    own: KeyPair
    public: PublicKeys

    def admits(self, key: PublicKey) -> Party | None:
        """Return whose ``key`` is, if that party may connect to this one; None: nobody's."""
        admitted = ADMITTED_BY[self.party]
        return next((party for party in admitted if key in self.public.of(party)), None)


@dataclass(frozen=True, slots=True)
class DeploymentKeys:
    """The pairs of every party, for whoever starts them all."""

    pairs: Mapping[Party, KeyPair]

    @classmethod
    def generate(cls) -> Self:
        """Return fresh random pairs."""
        return cls({party: KeyPair.generate() for party in PARTIES})

    def of(self, party: Party) -> ChannelKeys:
        """Return what a process of ``party`` is given: no secret key but its own."""
        public: dict[Party, PublicKey] = {other: pair.public for other, pair in self.pairs.items()}
        return ChannelKeys(party, self.pairs[party], FixedPublicKeys(public))
