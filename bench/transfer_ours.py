"""The whole path of a read in a decode worker: from the decision to the report of its end."""

import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import Literal

import uvloop

from bench.transfer_memory import POOL_NBYTES, Bytes, Case
from bench.transfer_source import SOURCE
from core.config import TransferConfig
from core.ids import Attempt, BlockId, Generation, Incarnation, OperationId, Owner, RequestId
from core.kv_layout import KVGroup, KVLayout
from core.messages import Compatibility, GroupBlocks, PieceId, PoolEndpoint, Welcome
from transfer.actions import PostRead
from transfer.rank_reads import RankReads
from transfer.reads import ReadEnd
from transfer.stats import TransferStats
from transfer.transports import open_transport

_BLOCK_SIZE = 16
_HEAD_DIM = 64
_DTYPE: Literal["bfloat16"] = "bfloat16"
_TOKEN_NBYTES = 2 * _HEAD_DIM * 2
_TIMEOUT_S = 60.0


def layout_of(block_nbytes: int) -> KVLayout:
    """Return a layout whose blocks have so many bytes."""
    num_heads = block_nbytes // (_BLOCK_SIZE * _TOKEN_NBYTES)
    return KVLayout(
        (KVGroup(layers=(0,)),),
        _BLOCK_SIZE,
        num_kv_heads=num_heads,
        head_dim=_HEAD_DIM,
        dtype=_DTYPE,
    )


class Ours:
    """Reads as a decode worker's rank does, on an event loop of its own, for one size of blocks."""

    def __init__(
        self,
        transport: str,
        pool: Bytes,
        endpoint: PoolEndpoint,
        options: Mapping[str, str],
        *,
        block_nbytes: int,
    ) -> None:
        self._loop = uvloop.new_event_loop()
        self._block_nbytes = block_nbytes
        self._ends: dict[OperationId, asyncio.Future[ReadEnd]] = {}
        self._numbers = itertools.count(1)
        self._transport = open_transport(
            transport, Incarnation(f"reader-{block_nbytes}"), ucx_options=options
        )
        self._transport.register(pool.ctypes.data, len(pool))
        self._keep = pool
        self._turn = 0
        layout = layout_of(block_nbytes)
        if layout.block_nbytes != block_nbytes:
            raise ValueError(f"no layout has blocks of {block_nbytes} bytes")
        compatibility = Compatibility(
            "model", "tokenizer", layout, layout.num_kv_heads, model_dtype=_DTYPE
        )
        welcome = Welcome("source", SOURCE, (endpoint,), compatibility)  # type: ignore[arg-type]
        self._loop.run_until_complete(self._open(compatibility, welcome))

    async def _open(self, compatibility: Compatibility, welcome: Welcome) -> None:
        self._reads = RankReads(
            self._transport,
            compatibility=compatibility,
            scratch_offset=POOL_NBYTES,
            config=TransferConfig(),
            stats=TransferStats(),
            on_end=lambda end: self._ends.pop(end.operation).set_result(end),
        )
        self._reads.connect(SOURCE, welcome)
        operation = self._expect()
        ended = self._ends[operation]
        self._reads.warm_up(operation, SOURCE)
        await self._done(ended)

    def path(self) -> str:
        """Return how the bytes travel."""
        return self._transport.path(SOURCE).description

    def restart(self) -> None:
        """Read from the beginning of the pool again."""
        self._turn = 0

    def time_of(self, case: Case) -> float:
        """Read ``case`` once; return the seconds from the decision to the report of its end."""
        return self._loop.run_until_complete(self._read(case))

    def idle_cpu_s(self, seconds: float) -> float:
        """Return the CPU time of this process while nothing is read for ``seconds``."""
        before = time.process_time()
        self._loop.run_until_complete(asyncio.sleep(seconds))
        return time.process_time() - before

    def close(self) -> None:
        """Give everything back."""
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _close(self) -> None:
        self._reads.close()

    async def _read(self, case: Case) -> float:
        read = self._post_read(case)
        ended = self._ends[read.operation]
        began = time.perf_counter()
        self._reads.post(read)
        await self._done(ended)
        return time.perf_counter() - began

    async def _done(self, ended: "asyncio.Future[ReadEnd]") -> None:
        async with asyncio.timeout(_TIMEOUT_S):
            end = await ended
        if end.failure is not None:
            raise RuntimeError(f"a read failed: {end.failure}")

    def _expect(self) -> OperationId:
        operation = OperationId(next(self._numbers))
        self._ends[operation] = self._loop.create_future()
        return operation

    def _post_read(self, case: Case) -> PostRead:
        operation = self._expect()
        owner: Owner = (RequestId(f"request-{operation}"), Attempt(1))
        target, source = (_blocks(case.block_ids(seed, self._turn)) for seed in (1, 2))
        self._turn += 1
        return PostRead(
            operation,
            SOURCE,
            owner,
            PieceId(0, 0, 0),
            source=(source,),
            target=(target,),
            first_token=0,
            end_token=case.num_blocks * _BLOCK_SIZE,
        )


def _blocks(ids: list[int]) -> GroupBlocks:
    block_ids = tuple(map(BlockId, ids))
    return GroupBlocks(0, 0, block_ids, tuple(Generation(1) for _ in block_ids))
