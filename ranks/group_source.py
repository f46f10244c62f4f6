"""The pools of all ranks as readers see them: one endpoint each."""

from collections.abc import Hashable

from core.messages import PoolEndpoint
from ranks.channels import FollowerChannels
from ranks.messages import Serve
from ranks.rank_transfers import RankSource


class GroupSource:
    """The pools of all ranks, each read for itself; see ``RankSource``."""

    def __init__(
        self,
        own: RankSource,
        others: tuple[PoolEndpoint, ...],
        channels: FollowerChannels | None,
    ) -> None:
        self._own = own
        self._channels = channels
        self.endpoints = (own.endpoint(), *others)
        """By rank."""

    @property
    def transport(self) -> str:
        """Name of what moves the bytes."""
        return self._own.transport

    def serve(self, reader: Hashable, *, active: bool) -> None:
        """``reader`` says whether reads of it are outstanding, on any rank."""
        self._own.serve(reader, active=active)
        if self._channels is not None:
            self._channels.send(Serve(reader, active))

    def close(self) -> None:
        """Serve nobody any more; ``Ranks.close`` ends the followers'."""
        self._own.close()
