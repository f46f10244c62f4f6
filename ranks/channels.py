"""From the leader's event loop to those of its followers."""

import asyncio

from core.errors import InternalError
from ranks.followers import Follower, Followers
from ranks.frames import FrameChannel
from ranks.group_reads import GroupReads
from ranks.messages import Command, Ended, Ping, Pong

PING_INTERVAL_S = 2.0
MAX_UNANSWERED = 7
"""Pings in a row without a word from a follower, before it is taken for frozen. Counted, not timed:
while this process was frozen itself, it has sent none."""


class FollowerChannels:
    """To the followers' event loops; see ``OtherRanks``."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self.reads: GroupReads | None = None
        """Told of what ends."""
        self._num_unanswered = {follower.rank: 0 for follower in followers}
        self._channels = {follower.rank: self._open(follower) for follower in followers}

    @property
    def ranks(self) -> tuple[int, ...]:
        """See ``OtherRanks.ranks``."""
        return tuple(self._channels)

    def send(self, command: Command) -> None:
        """See ``OtherRanks.send``."""
        for channel in self._channels.values():
            channel.send(command)

    async def watch(self) -> None:
        """Return never.

        Raises:
            InternalError: a follower is silent, so it is frozen, or its event loop is.
        """
        while True:
            self.send(Ping())
            for rank in self._num_unanswered:
                self._num_unanswered[rank] += 1
            await asyncio.sleep(PING_INTERVAL_S)
            silent = [rank for rank, n in self._num_unanswered.items() if n >= MAX_UNANSWERED]
            if silent:
                raise InternalError(
                    f"ranks {silent} of this worker do not answer: {MAX_UNANSWERED} pings, one in "
                    f"{PING_INTERVAL_S:g} s"
                )

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
            self._num_unanswered[follower.rank] = 0
            match message:
                case Pong():
                    pass
                case Ended(end) if self.reads is not None:
                    self.reads.ended(follower.rank, end)
                case _:
                    msg = f"rank {follower.rank} sent {message!r}"
                    raise InternalError(msg)

        # Its end is what ``Followers.watch`` sees, too, and reports.
        return FrameChannel(follower.transfers, on_message=take, on_lost=_leave_to_watch)


def _leave_to_watch() -> None:
    pass
