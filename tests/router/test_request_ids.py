"""Two routers never give one id to two requests, whatever their clients call them.

The failure guarded against: a prefill worker that takes the request of one router for a newer
attempt of another router's, and computes neither the one nor the other.
"""

import secrets
from pathlib import Path

import pytest

from core.ids import Attempt, Incarnation
from router.model_card import ModelCard
from router.prepare import Prepared, prepare_chat, prepare_completion
from router.protocol import ChatRequest, CompletionRequest
from tests.router.conftest import MODEL, StartRouter
from tests.router.scripted_worker import say
from transfer.tickets import TicketBook

ROUTERS = Incarnation("a" * 16), Incarnation("b" * 16)


@pytest.fixture
def prepared(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[Prepared]]:
    """What each router makes of the same requests, with the same luck."""
    monkeypatch.setattr(secrets, "token_hex", lambda nbytes: "0" * 2 * nbytes)
    card = ModelCard.load(model_path, name=MODEL, max_model_len=512)
    completion = CompletionRequest.model_validate({"model": MODEL, "prompt": ["a", "b"], "n": 2})
    chat = ChatRequest.model_validate(
        {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
    )
    return [
        [
            prepare_completion(completion, card, router=router, max_model_len=512),
            prepare_chat(chat, card, router=router, max_model_len=512),
        ]
        for router in ROUTERS
    ]


def test_h01_requests_of_two_routers_have_no_id_in_common(prepared: list[list[Prepared]]) -> None:
    ids = [{s.request_id for each in of_one for s in each.specs} for of_one in prepared]
    assert [len(of_one) for of_one in ids] == [5, 5]
    assert not ids[0] & ids[1]


def test_h01_a_newer_attempt_of_one_router_leaves_the_other_routers_request_alone(
    prepared: list[list[Prepared]],
) -> None:
    book = TicketBook(Incarnation("P"), 30.0)
    (ours, _), (theirs, _) = prepared
    assert book.open((theirs.specs[0].request_id, Attempt(2)), reader="D")
    assert book.open((ours.specs[0].request_id, Attempt(1)), reader="D")


async def test_h01_a_clients_own_id_is_no_part_of_what_workers_are_told(
    start_router: StartRouter,
) -> None:
    named: list[str] = []
    for _ in range(2):
        router = await start_router()
        worker = await router.start_worker(say([20, 21]))
        for _ in range(2):
            answer = await router.http.post(
                "/v1/completions",
                json={"model": MODEL, "prompt": "a"},
                headers={"x-request-id": "mine"},
            )
            assert answer.headers["x-request-id"] == "mine"
            assert answer.json()["choices"]
        named += [generate.request_id for generate in worker.generates]
    assert len(set(named)) == 4
    assert not any("mine" in request_id for request_id in named)
