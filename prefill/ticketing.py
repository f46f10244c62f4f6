"""From what a step has completed to the ticket that offers it."""

import msgspec

from core.messages import GroupBlocks, PieceId
from core.worker_metrics import WorkerMetrics
from engine.startup import Engine
from prefill.offers import SettledChunk
from prefill.readers import Readers
from transfer.tickets import Offer


class Ticketing:
    """Offers settled chunks to their readers."""

    def __init__(
        self, readers: Readers, engine: Engine, metrics: WorkerMetrics, *, checksums: bool
    ) -> None:
        """Offer to ``readers`` what is in the pool of ``engine``, with ``checksums`` or without."""
        self._readers = readers
        self._pool = engine.pool
        self._layout = engine.layout
        self._metrics = metrics
        self._checksums = checksums

    def issue(self, chunk: SettledChunk) -> None:
        """Ticket what is complete, if it is still wanted."""
        prompt = chunk.prompt
        prefill_s = self._readers.waited_s(prompt.owner)
        ticket = self._readers.offer(
            prompt.owner,
            Offer(
                piece=PieceId(
                    first_layer=chunk.first_layer,
                    last_layer=chunk.last_layer,
                    chunk=chunk.chunk,
                ),
                blocks=self._with_digests(chunk),
                num_tokens=chunk.num_tokens,
                last=chunk.is_last,
                first_token=chunk.first_token,
                num_cached_tokens=prompt.num_cached_tokens,
                prefill_s=prefill_s,
            ),
        )
        if ticket is not None and chunk.first_token is not None:
            cached = prompt.num_cached_tokens
            self._metrics.observe_stage("prefill", prefill_s)
            self._metrics.count_prompt(computed=prompt.num_tokens - cached, cached=cached)
            self._metrics.count_generated(1)

    def _with_digests(self, chunk: SettledChunk) -> tuple[GroupBlocks, ...]:
        """Tell the reader what it must find, if that is asked for. These layers are complete."""
        if not self._checksums:
            return chunk.blocks
        offset = chunk.first_layer * self._layout.layer_nbytes
        nbytes = (chunk.last_layer + 1) * self._layout.layer_nbytes - offset
        return tuple(
            msgspec.structs.replace(
                named, digests=self._pool.digests(named.block_ids, offset=offset, nbytes=nbytes)
            )
            for named in chunk.blocks
        )
