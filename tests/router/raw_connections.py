"""Connections to a router over which a test sends bytes as it likes."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Protocol

from router.server import RouterAddress

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Reachable(Protocol):
    """A router."""

    address: RouterAddress


class SendInPieces(Protocol):
    """Sends each piece when the router has taken the one before it."""

    def __call__(self, writer: asyncio.StreamWriter, *pieces: bytes) -> Awaitable[None]:
        """Send ``pieces``."""
        ...


@asynccontextmanager
async def connected(router: Reachable) -> AsyncIterator[Connection]:
    """Connect as any client may."""
    host, _, port = router.address.http.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Return status and error of the last answer of a connection, which then ends."""
    async with asyncio.timeout(60):
        content = await reader.read(-1)
    head, _, body = content.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


async def next_answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Return status and content of the next answer of a connection that stays."""
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        body = await reader.readexactly(int(fields[b"content-length"]))
    return int(head.split()[1]), body.decode()
