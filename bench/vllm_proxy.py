"""Joins a prefill and a decode vLLM: ``python bench/vllm_proxy.py PORT PREFILL_URL DECODE_URL``.

vLLM leaves this part to its user. Each completion runs for one token on the prefill engine, whose
answer tells the decode engine where to read the KV; the decode engine's stream goes to the client.
"""

import json
import sys
import uuid
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

_REQUEST_TIMEOUT_S = 600.0
_ASK_FOR_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_SESSION = web.AppKey("session", aiohttp.ClientSession)
_PREFILL = web.AppKey("prefill", str)
_DECODE = web.AppKey("decode", str)


async def complete(request: web.Request) -> web.StreamResponse:
    """Prefill on one engine, then stream from the other."""
    session, body = request.app[_SESSION], await request.json()
    headers = {"X-Request-Id": uuid.uuid4().hex}
    prefill = {**body, "max_tokens": 1, "stream": False}
    prefill["kv_transfer_params"] = _ASK_FOR_REMOTE_DECODE
    prefill.pop("stream_options", None)
    url = f"{request.app[_PREFILL]}/v1/completions"
    async with session.post(url, json=prefill, headers=headers) as answer:
        if answer.status != web.HTTPOk.status_code:
            return web.Response(status=answer.status, body=await answer.read())
        body["kv_transfer_params"] = json.loads(await answer.read())["kv_transfer_params"]
    url = f"{request.app[_DECODE]}/v1/completions"
    async with session.post(url, json=body, headers=headers) as answer:
        response = web.StreamResponse(status=answer.status)
        response.content_type = answer.content_type
        await response.prepare(request)
        async for data in answer.content.iter_any():
            await response.write(data)
        await response.write_eof()
    return response


async def health(_request: web.Request) -> web.Response:
    """Answer that the proxy itself is there."""
    return web.Response()


def make_app(prefill: str, decode: str) -> web.Application:
    """Return the proxy between two engines, given by their URLs."""

    async def keep_session(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S),
        ) as session:
            app[_SESSION] = session
            yield

    app = web.Application()
    app[_PREFILL], app[_DECODE] = prefill, decode
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/health", health)
    app.cleanup_ctx.append(keep_session)
    return app


def main() -> None:
    """Serve until interrupted."""
    port, prefill, decode = sys.argv[1:]
    web.run_app(make_app(prefill, decode), host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main()
