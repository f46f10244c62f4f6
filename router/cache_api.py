"""What operators ask of the workers' prefix caches over HTTP."""

from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from fastapi.responses import JSONResponse, Response

from core.messages import CacheState
from router.cache_control import CacheControl, WorkerCache

Status = Literal["done", "pending", "storage_failed", "unreachable"]
_WORST_FIRST: Final[tuple[Status, ...]] = ("unreachable", "storage_failed", "pending")
HTTP_OK = 200
HTTP_ACCEPTED = 202


@dataclass(frozen=True, slots=True)
class CacheAPI:
    """One method for each path below ``/v1/cache``."""

    control: CacheControl

    async def reset(self) -> Response:
        """Have every worker forget its prefixes. 200: all is gone; 202: not yet, or not known.

        A worker is ``pending`` while a block that was in use at the reset still is; nothing old
        can be hit even then. It is ``pending``, too, while storage has not taken the reset, and
        ``storage_failed`` where it did not: a worker that starts later may find old prefixes there.
        ``GET /v1/cache`` tells how far the reset is.
        """
        caches = await self.control.reset()
        statuses: list[Status] = [reset_status(cache) for cache in caches]
        overall = overall_status(statuses)
        body = {
            "status": overall,
            "workers": [
                _worker(cache) | _how_far(status, cache.state)
                for cache, status in zip(caches, statuses, strict=True)
            ],
        }
        return JSONResponse(body, HTTP_OK if overall == "done" else HTTP_ACCEPTED)

    async def show(self) -> Response:
        """Describe every worker's blocks and cache."""
        return JSONResponse(
            {"workers": [_worker(cache) | _described(cache) for cache in await self.control.show()]}
        )


def reset_status(cache: WorkerCache) -> Status:
    """Return how far one worker's reset is."""
    if cache.state is None:
        return "unreachable"
    if cache.state.storage == "failed":
        return "storage_failed"
    is_done = cache.state.reset == "done" and cache.state.storage != "pending"
    return "done" if is_done else "pending"


def overall_status(statuses: list[Status]) -> Status:
    """Return the worst of ``statuses``."""
    for status in _WORST_FIRST:
        if status in statuses:
            return status
    return "done"


def _worker(cache: WorkerCache) -> dict[str, object]:
    return {
        "worker_id": cache.worker_id,
        "role": cache.role,
        "incarnation": cache.incarnation,
        "silent_s": round(cache.silent_s, 1),
    }


def _how_far(status: Status, state: CacheState | None) -> dict[str, object]:
    return {
        "status": status,
        "storage": None if state is None else state.storage,
        "withheld": _withheld(state),
    }


def _withheld(state: CacheState | None) -> dict[str, int] | None:
    if state is None:
        return None
    return {name: state.blocks[name] for name in ("fenced", "quarantined")}


def _described(cache: WorkerCache) -> dict[str, object]:
    if cache.state is None:
        return {"status": "unreachable"}
    query_tokens = cache.state.query_tokens
    rate = cache.state.hit_tokens / query_tokens if query_tokens else 0.0
    return {"status": "ok", "hit_rate": round(rate, 4), **msgspec.to_builtins(cache.state)}
