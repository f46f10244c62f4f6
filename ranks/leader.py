"""All ranks of one worker behind what a single process offers: an engine, reads, a source."""

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from core.config import TransferConfig
from core.ids import Incarnation, OperationId
from core.messages import PoolEndpoint
from core.messages.base import Role
from core.worker_context import WorkerContext
from engine.rank_group import LEADER
from engine.startup import Engine, start_engine
from ranks.channels import FollowerChannels
from ranks.followers import Followers
from ranks.group_reads import GroupReads
from ranks.group_source import GroupSource
from ranks.limits import check_limits
from ranks.messages import RankSpec
from ranks.rank_transfers import RankSource, open_rank_reads, staging_nbytes
from ranks.ranked_runner import RankedRunner
from transfer.reads import ReadEnd, Reads
from transfer.stats import TransferStats


class Ranks:
    """A worker's ranks, this process being the leader. One rank is no special case for its owner.

    Belongs to the event loop that ``start`` was awaited in. The owner runs ``watch`` beside its own
    parts and awaits ``close`` at its end, whatever happened.
    """

    def __init__(
        self,
        engine: Engine,
        followers: Followers | None,
        *,
        endpoints: tuple[PoolEndpoint, ...],
        incarnation: Incarnation,
        config: TransferConfig,
    ) -> None:
        self.engine = engine
        """Its pool and layout are the leader's; its runner runs steps on all ranks."""
        self._followers = followers
        self._endpoints = endpoints
        self._incarnation = incarnation
        self._config = config
        self._channels = None if followers is None else FollowerChannels(followers)

    @classmethod
    async def start(
        cls, context: WorkerContext, role: Role, *, incarnation: Incarnation
    ) -> "Ranks":
        """Load the model and warm all ranks up.

        Raises:
            ConfigError: the model, a size or a combination of settings cannot be used.
            InternalError: a rank was lost on the way.
        """
        config = context.config
        check_limits(config)
        num_ranks = config.engine.tensor_parallel_size
        staging = staging_nbytes(config.transfer, role)
        if num_ranks == 1:
            engine = await asyncio.to_thread(
                start_engine, context.model_path, config, staging_nbytes=staging
            )
            return cls(engine, None, endpoints=(), incarnation=incarnation, config=config.transfer)
        followers = Followers(
            RankSpec(
                rank=LEADER,
                num_ranks=num_ranks,
                worker=context.worker_id,
                role=role,
                incarnation=incarnation,
                model_path=context.model_path,
                config=config,
                store=Path(tempfile.mkdtemp(prefix="sluice-ranks-")) / "store",
            )
        )
        try:
            engine = await asyncio.to_thread(
                start_engine,
                context.model_path,
                config,
                place=followers.place,
                staging_nbytes=staging,
            )
            endpoints = await asyncio.to_thread(followers.await_started)
        except BaseException:
            followers.kill()
            raise
        return cls(
            replace(engine, runner=RankedRunner(engine.runner, followers)),
            followers,
            endpoints=tuple(endpoint for endpoint in endpoints if endpoint is not None),
            incarnation=incarnation,
            config=config.transfer,
        )

    async def watch(self) -> None:
        """Return never.

        Raises:
            InternalError: a rank is gone, or frozen.
        """
        if self._followers is None or self._channels is None:
            await asyncio.Event().wait()
            return
        parts = {
            asyncio.create_task(self._followers.watch()),
            asyncio.create_task(self._channels.watch()),
        }
        try:
            ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in ended:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    def open_reads(
        self,
        stats: TransferStats,
        on_end: Callable[[ReadEnd], None],
        on_begun: Callable[[OperationId], None] = lambda _: None,
    ) -> Reads:
        """Return what carries reads of all ranks out. Once.

        A read begins when the leader's part does: a source that freezes holds up every rank's, or
        lets the leader's begin.

        Raises:
            ConfigError: the transport cannot be used.
        """

        def open_own(on_own_end: Callable[[ReadEnd], None]) -> Reads:
            return open_rank_reads(
                self.engine,
                self._config,
                incarnation=self._incarnation,
                stats=stats,
                on_end=on_own_end,
                on_begun=on_begun,
            )

        if self._channels is None:
            return open_own(on_end)
        self._channels.reads = GroupReads(open_own, self._channels, on_end)
        return self._channels.reads

    def open_source(self) -> GroupSource:
        """Return the pools of all ranks as others read them. Once.

        Raises:
            ConfigError: the transport cannot be used.
        """
        own = RankSource(self.engine, self._config, incarnation=self._incarnation)
        return GroupSource(own, self._endpoints, self._channels)

    async def close(self) -> None:
        """End the followers and what leads to them. On return nothing of theirs runs any more."""
        if self._channels is not None:
            self._channels.close()
        if self._followers is not None:
            await asyncio.to_thread(self._followers.kill)
