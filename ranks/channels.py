"""From the leader's event loop to those of its followers."""

from core.errors import InternalError
from ranks.followers import Follower, Followers
from ranks.frames import FrameChannel
from ranks.group_reads import GroupReads
from ranks.messages import Command, Ended, Observed
from transfer.stats import TransferStats


class FollowerChannels:
    """To the followers' event loops; see ``OtherRanks``."""

    def __init__(self, followers: Followers, stats: TransferStats) -> None:
        self._followers = followers
        self._stats = stats
        self.reads: GroupReads | None = None
        self._channels = {follower.rank: self._open(follower) for follower in followers}

    @property
    def ranks(self) -> tuple[int, ...]:
        """See ``OtherRanks.ranks``."""
        return tuple(self._channels)

    def send(self, command: Command) -> None:
        """See ``OtherRanks.send``."""
        for channel in self._channels.values():
            channel.send(command)

    def kill(self) -> None:
        """See ``OtherRanks.kill``."""
        self.close()
        self._followers.kill()

    def close(self) -> None:
        """Hear and say nothing any more."""
        for channel in self._channels.values():
            channel.close()

    def _open(self, follower: Follower) -> FrameChannel:
        def take(message: object) -> None:
            match message:
                case Ended(end) if self.reads is not None:
                    self.reads.ended(follower.rank, end)
                case Observed(read):
                    self._stats.observe_read(read)
                case _:
                    msg = f"rank {follower.rank} sent {message!r}"
                    raise InternalError(msg)

        # Its end is what ``Followers.watch`` sees, too, and reports.
        return FrameChannel(follower.transfers, on_message=take, on_lost=_leave_to_watch)


def _leave_to_watch() -> None:
    pass
