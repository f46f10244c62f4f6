"""A small server of the S3 protocol: put, get, head and list of objects, over real HTTP.

It checks no signature. ``mode`` makes it answer like a store in trouble.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from aiohttp import web

Mode = Literal["works", "errors", "hangs", "cuts"]


@dataclass
class S3Server:
    """Objects by path; ``endpoint`` once it runs."""

    objects: dict[str, bytes] = field(default_factory=dict[str, bytes])
    mode: Mode = "works"
    endpoint: str = ""

    @asynccontextmanager
    async def run(self) -> AsyncIterator["S3Server"]:
        """Serve on a free port of this machine."""
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.endpoint = f"http://{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        if self.mode == "errors":
            return web.Response(status=503, text="<Error><Code>SlowDown</Code></Error>")
        if self.mode == "hangs":
            await asyncio.sleep(60)
        if request.method == "PUT":
            self.objects[path] = await request.read()
            return web.Response(headers={"ETag": '"1"'})
        if "list-type" in request.query:
            return self._list(f"{path}/{request.query.get('prefix', '')}", bucket=path)
        if path not in self.objects:
            return web.Response(status=404, text="<Error><Code>NoSuchKey</Code></Error>")
        content = self.objects[path]
        headers = {"ETag": '"1"', "Last-Modified": "Sun, 01 Jan 2023 00:00:00 GMT"}
        if self.mode == "cuts":
            return await self._cut_off(request, content, headers)
        return web.Response(body=content, headers=headers)

    def _list(self, prefix: str, *, bucket: str) -> web.Response:
        contents = "".join(
            f"<Contents><Key>{path.removeprefix(f'{bucket}/')}</Key><Size>{len(content)}</Size>"
            '<LastModified>2023-01-01T00:00:00.000Z</LastModified><ETag>"1"</ETag></Contents>'
            for path, content in self.objects.items()
            if path.startswith(prefix)
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        return web.Response(text=text, content_type="application/xml")

    async def _cut_off(
        self, request: web.Request, content: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        """Promise all of ``content``, send half of it and close."""
        response = web.StreamResponse(headers=headers)
        response.content_length = len(content)
        await response.prepare(request)
        if request.method == "GET":
            await response.write(content[: len(content) // 2])
        if request.transport is not None:
            request.transport.close()
        return response
