"""One table says what is served, what needs a key, and what is counted: a path is in all or none.

The failures guarded against: a new path that nobody listed as closed, or that is counted as
"other"; a load balancer that asks for the head of a path and takes a 405 for a router that is down.
"""

import asyncio
from pathlib import Path

import pytest
from starlette.routing import Route

from core.channel import DeploymentKeys
from core.config import SluiceConfig
from core.lifecycle import Lifecycle
from core.trace import Recorder
from router.api import RouterAPI, create_app
from router.dispatch import Dispatcher
from router.endpoints import ENDPOINTS, OPEN_PATHS, OTHER, label_of
from router.fleet import Fleet
from router.metrics import LatencyGoals, RouterMetrics
from router.model_card import ModelCard
from tests.router.conftest import MODEL, RunningRouter, StartRouter

DOCUMENTATION = {"/openapi.json", "/docs", "/docs/oauth2-redirect"}
"""FastAPI's own: they need a key, and are counted as other."""


async def test_every_route_is_in_the_table_and_nothing_else_is(model_path: Path) -> None:
    card = ModelCard.load(model_path, name="model", max_model_len=None)
    metrics = RouterMetrics(LatencyGoals(ttft_s=1.0, itl_s=1.0))
    config = SluiceConfig()
    fleet = Fleet(
        config,
        host="127.0.0.1",
        control_port=0,
        keys=DeploymentKeys.generate().of("router"),
        metrics=metrics,
        probe_token_id=card.probe_token_id,
        recorder=Recorder(lambda: 0.0, max_requests=1),
        lifecycle=Lifecycle(),
    )
    dispatcher = Dispatcher(config, fleet, card.tokenizer, metrics, card.name)
    app = create_app(RouterAPI(card, fleet, dispatcher, metrics, max_body_nbytes=1))
    running = asyncio.create_task(fleet.run(dispatcher))
    await asyncio.sleep(0)
    running.cancel()  # closes its port
    routes = {
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route) and route.path not in DOCUMENTATION
        for method in route.methods or ()
    }
    served = {(method, each.path) for each in ENDPOINTS for method in each.methods}
    assert routes == served
    assert len(app.routes) == len(served) + len(DOCUMENTATION)
    described = {
        (method.upper(), path.replace("{name}", "{name:path}"))
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    assert described == {(each.method, each.path) for each in ENDPOINTS}


@pytest.mark.parametrize(
    "path", [each.path.replace("{name:path}", MODEL) for each in ENDPOINTS if each.method == "GET"]
)
async def test_a_probe_may_ask_for_the_head_of_what_it_may_get(
    router: RunningRouter, path: str
) -> None:
    got, head = await router.http.get(path), await router.http.head(path)
    assert head.status_code == got.status_code
    assert head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    if path not in {"/metrics", "/status"}:  # these tell of the moment
        assert head.headers["content-length"] == got.headers["content-length"]


async def test_who_must_not_post_hears_of_both_that_are_allowed(router: RunningRouter) -> None:
    answer = await router.http.post("/livez")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert "use GET, HEAD" in answer.json()["error"]["message"]


async def test_the_head_of_a_generation_is_none(router: RunningRouter) -> None:
    answers = [await router.http.head(e.path) for e in ENDPOINTS if e.method == "POST"]
    assert {answer.status_code for answer in answers} == {405}


async def test_who_asks_for_the_head_needs_the_same_key(
    start_router: StartRouter, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a" * 16)
    router = await start_router(security={"api_keys_file": str(keys)})
    answers = {each: await router.http.head(each) for each in ("/livez", "/v1/models")}
    assert {path: answer.status_code for path, answer in answers.items()} == {
        "/livez": 200,
        "/v1/models": 401,
    }


def test_what_is_open_names_no_worker_and_no_request() -> None:
    assert {"/health", "/livez", "/ready", "/readyz", "/metrics"} == OPEN_PATHS


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/v1/completions", "/v1/completions"),
        ("/v1/models", "/v1/models"),
        ("/v1/models/a/b", "/v1/models"),
        ("/v1/trace/cmpl-1", "/v1/trace"),
        ("/v1/tracers", OTHER),
        ("/v1/cache/reset", "/v1/cache/reset"),
        ("/v1/cache/nothing", OTHER),
        ("/", OTHER),
        ("", OTHER),
        ("/readyz/", OTHER),
    ],
)
def test_a_path_is_counted_by_its_endpoint_and_never_by_a_name_in_it(path: str, label: str) -> None:
    assert label_of(path) == label
