"""One streamed completion, which may be left early."""

import asyncio
import json
from collections.abc import Sequence

import httpx


async def stream(
    client: httpx.AsyncClient,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    leave_after: int | None,
    begun: asyncio.Event | None = None,
    **fields: object,
) -> list[int] | None:
    """Return the streamed token ids; None after leaving early. ``begun`` is set with the first.

    ``fields`` are of the request, too.
    """
    body = {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **fields,
    }
    token_ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            token_ids += chunk["choices"][0]["token_ids"]
            if begun is not None:
                begun.set()
            if leave_after is not None and len(token_ids) >= leave_after:
                return None
    return token_ids
