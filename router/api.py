"""The HTTP API: OpenAI's, and what operators and probes ask."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from core.errors import ModelNotFoundError, RequestError, RequestTooLargeError, SluiceError
from core.messages import DesiredWorkers, Heartbeat
from router import endpoints
from router.api_keys import ApiKeys, KeyedApp
from router.body import read_body
from router.cache_api import CacheAPI
from router.dispatch import Dispatcher
from router.draining import ClosingApp
from router.endpoints import Endpoint
from router.error_responses import answer_error, answer_http_error, answer_unexpected
from router.failures import ContextLengthError
from router.fleet import Fleet
from router.formats import ChatFormat, CompletionFormat, ResponseOptions
from router.metrics import CONTENT_TYPE, RouterMetrics
from router.model_card import ModelCard
from router.observed import ObservedApp
from router.parsing import parse_request
from router.prepare import Prepared, prepare_chat, prepare_completion
from router.protocol import ChatRequest, CompletionRequest, GenerationRequest
from router.registry import Worker
from router.serving import GenerationResponse
from router.trace_api import TraceAPI

STATS_HEADER = "x-sluice-stats"
INLINE_BODY_NBYTES = 4096
"""Larger bodies are parsed and tokenized in a thread, so that streams do not wait for them."""

Parsed = TypeVar("Parsed", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class RouterAPI:
    """The parts that answer requests, and one method for each path."""

    card: ModelCard
    fleet: Fleet
    dispatcher: Dispatcher
    metrics: RouterMetrics
    max_body_nbytes: int

    async def models(self) -> Response:
        """List the one model that is served."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """Describe one model."""
        if name != self.card.name:
            raise ModelNotFoundError(
                f"model {name!r:.100} does not exist here; use {self.card.name!r}", field="model"
            )
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        parsed, prepared = await self._prepare(request, CompletionRequest, prepare_completion)
        decode = self.card.tokenizer.decode
        echoes = tuple(decode(spec.prompt_token_ids) for spec in prepared.specs if parsed.echo)
        options = _options(request, parsed, prepared, logprobs=parsed.logprobs, echoes=echoes)
        form = CompletionFormat(self.card, options)
        return GenerationResponse(self.dispatcher, prepared, form, stream=parsed.stream)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        parsed, prepared = await self._prepare(request, ChatRequest, prepare_chat)
        options = _options(request, parsed, prepared, logprobs=0 if parsed.logprobs else None)
        form = ChatFormat(self.card, options)
        return GenerationResponse(self.dispatcher, prepared, form, stream=parsed.stream)

    async def health(self) -> Response:
        """Tell that the process lives."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """Tell whether a generation would pass: a decode worker has answered one."""
        counts = {role: len(self.fleet.registry.usable(role)) for role in ("prefill", "decode")}
        is_ready = counts["decode"] > 0 and not self.dispatcher.admission.is_leaving
        status = "ready" if is_ready else "no decode worker is ready"
        if self.dispatcher.admission.is_leaving:
            status = "draining"
        return JSONResponse({"status": status, **counts}, 200 if is_ready else 503)

    async def status(self) -> Response:
        """Describe the workers, for ``sluice status``."""
        now_s = asyncio.get_running_loop().time()
        desired = self.fleet.desired()
        workers = [
            _worker_status(worker, now_s=now_s)
            for role in ("prefill", "decode")
            for worker in self.fleet.registry.workers(role)
        ]
        workers += [
            _lost_status(lost, now_s=now_s) for lost in self.fleet.registry.lost(now_s=now_s)
        ]
        return JSONResponse(
            {
                "model": self.card.name,
                "max_model_len": self._max_model_len(),
                "pending_requests": self.dispatcher.admission.num_pending,
                **_wanted_status(desired),
                "controller_silence_s": self.fleet.controller_silence_s(),
                "workers": workers,
            }
        )

    async def prometheus(self) -> Response:
        """Give the router's metrics."""
        return Response(self.metrics.render(), media_type=CONTENT_TYPE)

    async def _prepare(
        self,
        request: Request,
        kind: type[Parsed],
        prepare: Callable[..., Prepared],
    ) -> tuple[Parsed, Prepared]:
        """Return the request in the body and the sequences that it asks for."""
        arrived_at = self.fleet.traces.recorder.now()
        try:
            body = await read_body(request, max_nbytes=self.max_body_nbytes)
            self.dispatcher.admission.check_room()
            with self.metrics.stage("tokenize"):
                if len(body) <= INLINE_BODY_NBYTES:
                    parsed, prepared = self._parse(body, kind, prepare)
                else:
                    parsed, prepared = await asyncio.to_thread(self._parse, body, kind, prepare)
        except RequestError as error:
            self.metrics.rejections.labels(reason=_rejection(error)).inc()
            raise
        TraceAPI(self.fleet.traces).begin(request, prepared, arrived_at=arrived_at)
        return parsed, prepared

    def _parse(
        self, body: bytes, kind: type[Parsed], prepare: Callable[..., Prepared]
    ) -> tuple[Parsed, Prepared]:
        parsed = parse_request(body, kind)
        router, max_model_len = self.fleet.incarnation, self._max_model_len()
        return parsed, prepare(parsed, self.card, router=router, max_model_len=max_model_len)

    def _max_model_len(self) -> int:
        return self.fleet.max_model_len() or self.card.max_model_len

    def _model(self) -> dict[str, object]:
        return {
            "id": self.card.name,
            "object": "model",
            "created": self.card.created,
            "owned_by": "sluice",
            "max_model_len": self._max_model_len(),
        }


def create_app(api: RouterAPI, keys: ApiKeys | None = None) -> FastAPI:
    """Return the ASGI app that serves ``api``, to who has one of ``keys``; None: to all."""
    app = FastAPI(title="Sluice", description="OpenAI-compatible API", redoc_url=None)
    if keys is not None:
        app.add_middleware(KeyedApp, keys=keys)  # within what observes: refusals are counted
    app.add_middleware(ObservedApp, metrics=api.metrics, model=api.card.name)
    app.add_middleware(ClosingApp, is_leaving=lambda: api.dispatcher.admission.is_leaving)
    app.add_exception_handler(SluiceError, answer_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(Exception, answer_unexpected)
    handlers = _handlers(api)
    for endpoint in endpoints.ENDPOINTS:
        for method in endpoint.methods:
            app.add_api_route(
                endpoint.path,
                handlers[endpoint],
                methods=[method],  # the server leaves out the body of what HEAD asks for
                openapi_extra=_BODY_SCHEMAS.get(endpoint),
                include_in_schema=method == endpoint.method,
            )
    return app


def _handlers(api: RouterAPI) -> dict[Endpoint, Callable[..., Awaitable[Response]]]:
    """Return what answers at each endpoint."""
    cache = CacheAPI(api.fleet.caches)
    return {
        endpoints.COMPLETIONS: api.completions,
        endpoints.CHAT_COMPLETIONS: api.chat_completions,
        endpoints.MODELS: api.models,
        endpoints.MODEL: api.model,
        endpoints.CACHE: cache.show,
        endpoints.CACHE_RESET: cache.reset,
        endpoints.TRACE: TraceAPI(api.fleet.traces).show,
        endpoints.STATUS: api.status,
        endpoints.HEALTH: api.health,
        endpoints.LIVEZ: api.health,
        endpoints.READY: api.ready,
        endpoints.READYZ: api.ready,
        endpoints.METRICS: api.prometheus,
    }


def _body_schema(kind: type[GenerationRequest]) -> dict[str, Any]:
    """Return the OpenAPI part that describes a body which the endpoint parses itself."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


_BODY_SCHEMAS = {
    endpoints.COMPLETIONS: _body_schema(CompletionRequest),
    endpoints.CHAT_COMPLETIONS: _body_schema(ChatRequest),
}


def _options(
    request: Request,
    parsed: GenerationRequest,
    prepared: Prepared,
    *,
    logprobs: int | None,
    echoes: tuple[str, ...] = (),
) -> ResponseOptions:
    return ResponseOptions(
        response_id=prepared.response_id,
        num_prompt_tokens=prepared.num_prompt_tokens,
        include_usage=parsed.include_usage,
        logprobs=logprobs,
        echoes=echoes,
        with_stats=request.headers.get(STATS_HEADER) == "1",
        with_token_ids=parsed.return_token_ids,
    )


def _rejection(error: RequestError) -> str:
    if isinstance(error, RequestTooLargeError):
        return "too_large"
    return "too_long" if isinstance(error, ContextLengthError) else "invalid"


def _wanted_status(desired: DesiredWorkers | None) -> dict[str, object]:
    """Tell how many workers of each role are wanted and by which config; None: nobody knows."""
    if desired is None:
        return {"desired": None, "desired_revisions": None, "trouble": []}
    return {
        "desired": {"prefill": desired.prefill, "decode": desired.decode},
        "desired_revisions": {
            "prefill": desired.prefill_revision,
            "decode": desired.decode_revision,
        },
        "trouble": desired.trouble,
    }


def _worker_status(worker: Worker, *, now_s: float) -> dict[str, object]:
    return _described(
        worker.heartbeat,
        state=worker.heartbeat.state if worker.proven else "starting",
        silent_s=now_s - worker.last_seen_s,
        suspect=worker.suspect,
    )


def _lost_status(worker: Worker, *, now_s: float) -> dict[str, object]:
    silent_s = now_s - worker.last_seen_s
    return _described(worker.heartbeat, state="lost", silent_s=silent_s, suspect=False)


def _described(
    heartbeat: Heartbeat, *, state: str, silent_s: float, suspect: bool
) -> dict[str, object]:
    return {
        "worker_id": heartbeat.worker_id,
        "role": heartbeat.role,
        "incarnation": heartbeat.incarnation,
        "state": state,
        "suspect": suspect,
        "silent_s": round(max(0.0, silent_s), 1),
        "revision": heartbeat.revision,
        "compat_hash": heartbeat.compat_hash,
        "address": heartbeat.address,
        "metrics_address": heartbeat.metrics_address,
        "load": msgspec.to_builtins(heartbeat.load),
    }
