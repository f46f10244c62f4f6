"""Runs one generation and writes it to the client: whole, or as server-sent events.

The status line is not sent before the first delta, so a request that fails until then gets its
proper status. A stream that fails later ends with an error event and without ``[DONE]``. A client
that stays but does not read counts as one that left: it would hold its place for ever.
"""

import asyncio
import logging
from collections.abc import Coroutine

from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from router.dispatch import Dispatcher
from router.error_responses import error_body
from router.formats import ResponseFormat, joined, usage_of
from router.generation import Generation, IndexedDelta
from router.prepare import Prepared
from router.responses import DONE_EVENT, to_event, to_json
from router.sequence import Delta

log = logging.getLogger(__name__)

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """The answer to a completion or chat request. A client that leaves ends the generation."""

    def __init__(
        self, dispatcher: Dispatcher, prepared: Prepared, form: ResponseFormat, *, stream: bool
    ) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._prepared = prepared
        self._form = form
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate until the end, the first failure, or the client's leaving or not reading."""
        write = self._write_stream if self._stream else self._write_whole
        client = _Client(send, timeout_s=self._dispatcher.config.router.write_timeout_s)
        try:
            if await _run_while_connected(receive, write(scope, client.send), client):
                return
            outcome = "client_left"
        except _ClientStalledError:
            outcome = "client_stalled"
        scope["state"]["outcome"] = 499
        log.info("response=%s outcome=%s", self._prepared.response_id, outcome)

    async def _write_whole(self, scope: Scope, send: Send) -> None:
        del scope
        deltas: list[list[Delta]] = [[] for _ in self._prepared.specs]
        async with self._dispatcher.generate(self._prepared.specs) as generation:
            while news := await generation.next_deltas():
                for indexed in news:
                    deltas[indexed.index].append(indexed.delta)
        options = self._form.options
        sequences = generation.sequences
        body = to_json(
            self._form.body(
                [self._form.whole_choice(i, joined(parts)) for i, parts in enumerate(deltas)],
                is_chunk=False,
                usage=usage_of(sequences, num_prompt_tokens=options.num_prompt_tokens),
                stats=sequences[0].stats if options.with_stats else UNSET,
            )
        )
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _write_stream(self, scope: Scope, send: Send) -> None:
        async with self._dispatcher.generate(self._prepared.specs) as generation:
            news = await generation.next_deltas()
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            try:
                await self._write_events(generation, news, send)
            except _ClientStalledError:
                raise  # there is nobody to tell
            except Exception as error:  # noqa: BLE001 - the top of a request: told to the client
                scope["state"]["outcome"] = error_body(error)[0].status
                log.warning("response=%s failed=%r", self._prepared.response_id, error)
                last = to_event(error_body(error)[1])
                await send({"type": "http.response.body", "body": last})

    async def _write_events(
        self, generation: Generation, news: list[IndexedDelta], send: Send
    ) -> None:
        events = self._openings()
        while news:
            events += [event for indexed in news if (event := self._event(generation, indexed))]
            if events:
                body = b"".join(events)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            news = await generation.next_deltas()
            events = []
        if self._form.options.include_usage:
            events.append(self._usage_event(generation))
        events.append(DONE_EVENT)
        await send({"type": "http.response.body", "body": b"".join(events)})

    def _openings(self) -> list[bytes]:
        usage = None if self._form.options.include_usage else UNSET
        choices = [self._form.opening(index) for index in range(len(self._prepared.specs))]
        return [
            to_event(self._form.body([choice], is_chunk=True, usage=usage))
            for choice in choices
            if choice is not None
        ]

    def _event(self, generation: Generation, indexed: IndexedDelta) -> bytes | None:
        """Return the event of one delta; None where there is nothing to show."""
        delta, options = indexed.delta, self._form.options
        shows_ids = options.with_token_ids and delta.token_ids
        if not (delta.text or delta.entries or delta.finish_reason or shows_ids):
            return None
        with_stats = options.with_stats and delta.finish_reason is not None
        body = self._form.body(
            [self._form.chunk_choice(indexed.index, delta)],
            is_chunk=True,
            usage=None if options.include_usage else UNSET,
            stats=generation.sequences[indexed.index].stats if with_stats else UNSET,
        )
        return to_event(body)

    def _usage_event(self, generation: Generation) -> bytes:
        options = self._form.options
        sequences = generation.sequences
        usage = usage_of(sequences, num_prompt_tokens=options.num_prompt_tokens)
        stats = sequences[0].stats if options.with_stats else UNSET
        return to_event(self._form.body([], is_chunk=True, usage=usage, stats=stats))


class _ClientStalledError(Exception):
    """The client is connected, and has taken nothing of its answer for too long."""


class _Client:
    """Who gets the answer. Its server waits in ``send`` while its buffer is full, for ever."""

    def __init__(self, send: Send, *, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self.has_all = False
        """Whether the last part was sent: the server calls the client disconnected from then on."""

    async def send(self, message: Message) -> None:
        """Send ``message``.

        Raises:
            _ClientStalledError: the client has not taken it for ``timeout_s``.
        """
        self.has_all = message["type"] == "http.response.body" and not message.get("more_body")
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError as error:
            raise _ClientStalledError from error


async def _run_while_connected(
    receive: Receive, work: Coroutine[None, None, None], client: _Client
) -> bool:
    """Run ``work`` until its end, or cancel it when the client disconnects before it has all.

    Returns:
        Whether ``work`` came to its end. What it raises is raised.
    """
    writing = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({writing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not writing.done() and not client.has_all:
            return False
        await writing
        return True
    finally:
        writing.cancel()
        watching.cancel()
        await asyncio.gather(writing, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
