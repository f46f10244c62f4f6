"""A peer with a good key that lies: it may cost its own requests, and nobody else's.

A key can be stolen, and a worker can go mad. The test holds the deployment's keys, and speaks to
its real workers as one of them: whatever it says, they go on serving right answers, as the same
processes, and all of their blocks come back.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.channel import ClientChannel, ClientId
from core.errors import PeerLostError
from core.ids import Attempt, Incarnation, RequestId
from core.messages import (
    AnyMessage,
    Generate,
    Hello,
    OutputBatch,
    Prefill,
    PrefillFailed,
    Released,
    Renew,
    Renewed,
    Ticket,
    Withdraw,
)
from tests.core.message_strategies import messages
from tests.integration.impostors import (
    LIES,
    NUM_TOKENS,
    SEEDS,
    LyingPrefill,
    address_of,
    all_tickets,
    ask,
    handshake_of,
    liar,
    pools_of,
    prefill_of,
    reader_channel,
    renewed,
)
from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import complete_all, generate_reference, prompt_of
from tests.integration.stack import Stack

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def stack(model_path: Path) -> Iterator[Stack]:
    with Stack.open(
        model_path,
        model={"dtype": "float32"},
        cache={"memory_gib": 0.05, "poison": True},
        transfer={
            "lease_s": 10.0,
            "renew_interval_s": 0.5,
            "read_timeout_s": 2.0,
            "prefill_timeout_s": 3.0,
        },
    ) as stack:
        yield stack


def incarnations(stack: Stack) -> set[str]:
    return {stack.worker(name)["incarnation"] for name in ("prefill-0", "decode-0")}


@pytest.fixture(scope="module")
def right_answers(model_path: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts, each with what the model says."""
    prompts = [prompt_of(90 + 5 * n, VOCAB_SIZE, seed=500 + n) for n in range(32)]
    answers = generate_reference(model_path, prompts, num_tokens=NUM_TOKENS)
    return list(zip(prompts, answers, strict=True))


@pytest.fixture(autouse=True)
def _still_serves(stack: Stack, right_answers: list[tuple[list[int], list[int]]]) -> Iterator[None]:
    """After each test the same processes give right answers, and hold nothing."""
    before = incarnations(stack)
    yield
    prompts = [prompt for prompt, _ in right_answers[:2]]
    answers = asyncio.run(
        complete_all(
            stack.url, prompts, max_tokens=NUM_TOKENS, ignore_eos=True, return_token_ids=True
        )
    )
    token_ids = [answer["choices"][0]["token_ids"] for answer in answers]
    assert token_ids == [answer for _, answer in right_answers[:2]]
    assert incarnations(stack) == before
    for worker in ("prefill-0", "decode-0"):
        stack.wait_idle(worker)


# As a decode worker, to prefill


async def test_reader_that_sends_anything_is_lost_or_ignored(stack: Stack) -> None:
    hello = await handshake_of(stack)
    kinds = (Prefill, Renew, Released, Withdraw, Generate, Ticket, Renewed, Hello, OutputBatch)

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.sampled_from(kinds).flatmap(messages), max_size=20))
    def storm(said: list[AnyMessage]) -> None:
        batches.append(said)

    batches: list[list[AnyMessage]] = []
    storm()
    for number, said in enumerate(batches):
        channel = reader_channel(stack, hello, f"liar-{number}")
        await channel.connect()
        for message in said:
            channel.send(message)
        await asyncio.sleep(0.01)
        channel.close()


async def test_reader_cannot_end_or_extend_what_another_has_asked_for(stack: Stack) -> None:
    """D14, D15: a release counts where it comes from the reader, for this life of the source."""
    hello = await handshake_of(stack)
    owner, thief = (reader_channel(stack, hello, name) for name in ("owner", "thief"))
    welcome = await owner.connect()
    await thief.connect()
    # Given a request of one reader whose ticket is out
    owner.send(prefill_of("mine", prompt_of(100, VOCAB_SIZE, seed=next(SEEDS))))
    await all_tickets(owner)
    # When another one releases, withdraws and renews it
    thief.send(Released(RequestId("mine"), Attempt(1), welcome.incarnation))
    thief.send(Withdraw(RequestId("mine"), Attempt(1)))
    mine = (RequestId("mine"), Attempt(1))
    # Then it is void to that one, and held for its reader
    assert (await renewed(thief, 1, mine)).void == (mine,)
    assert (await renewed(owner, 1, mine)).requests == (mine,)
    # And a release for another life of the source frees nothing, one for this life does
    owner.send(Released(*mine, Incarnation("before")))
    assert (await renewed(owner, 2, mine)).requests == (mine,)
    owner.send(Released(*mine, welcome.incarnation))
    assert (await renewed(owner, 3, mine)).void == (mine,)
    for channel in (owner, thief):
        channel.close()


async def test_d14_a_consumed_request_that_is_asked_for_again_gets_no_ticket(stack: Stack) -> None:
    hello = await handshake_of(stack)
    channel = reader_channel(stack, hello, "again")
    welcome = await channel.connect()
    request = prefill_of("once", prompt_of(100, VOCAB_SIZE, seed=next(SEEDS)))
    channel.send(request)
    await all_tickets(channel)
    channel.send(Released(request.request_id, request.attempt, welcome.incarnation))
    # When it is asked for again, on this channel and on another
    other = reader_channel(stack, hello, "other")
    await other.connect()
    channel.send(request)
    other.send(request)
    # Then nothing comes of it but the answers to what was asked behind it
    for number, asking in enumerate((channel, other), start=1):
        owner = (request.request_id, request.attempt)
        asking.send(Renew(sequence=number, requests=(owner,)))
        answer = await asking.receive()
        assert isinstance(answer, Renewed)
        assert answer.void == (owner,)
        asking.close()


async def test_h09_reader_of_another_version_or_layout_learns_no_address(stack: Stack) -> None:
    hello = await handshake_of(stack)
    assert hello.compatibility is not None
    layout = hello.compatibility.kv_layout
    for change in (
        {"protocol_version": hello.protocol_version + 1},
        {"compatibility": msgspec.structs.replace(hello.compatibility, features=("lease",))},
        {"compatibility": msgspec.structs.replace(hello.compatibility, model_fingerprint="x")},
        {"compatibility": None},
        {
            "compatibility": msgspec.structs.replace(
                hello.compatibility, kv_layout=msgspec.structs.replace(layout, num_kv_heads=7)
            )
        },
    ):
        told: list[AnyMessage] = []
        channel = reader_channel(stack, msgspec.structs.replace(hello, **change), "odd")
        told.append(await channel._say_hello())
        assert [type(message).__name__ for message in told] == ["Refused"], change
        channel.close()


# As a prefill worker, to decode


@pytest.mark.parametrize("what", LIES)
async def test_c23_whatever_prefill_says_the_answer_is_right(
    stack: Stack, right_answers: list[tuple[list[int], list[int]]], what: str
) -> None:
    prompt, expected = right_answers[2 + list(LIES).index(what)]
    async with liar(stack, lambda side, _client, request: LIES[what](side, request)) as side:
        side.pools = await pools_of(stack)
        token_ids = await ask(stack, side, prompt)
    assert token_ids == expected


async def test_c23_prefill_that_says_anything_costs_no_answer(
    stack: Stack, right_answers: list[tuple[list[int], list[int]]]
) -> None:
    said: list[list[AnyMessage]] = []

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.sampled_from((Ticket, Renewed, PrefillFailed)).flatmap(messages)))
    def collect(batch: list[AnyMessage]) -> None:
        said.append(batch)

    collect()

    def lie(side: LyingPrefill, _client: ClientId, request: Prefill) -> list[AnyMessage]:
        """Random messages, in the name of this request and source where they have such."""
        names = {
            "request_id": request.request_id,
            "attempt": request.attempt,
            "incarnation": side.incarnation,
        }
        return [
            msgspec.structs.replace(
                message,
                **{name: names[name] for name in message.__struct_fields__ if name in names},
            )
            for message in said.pop()
        ] + [PrefillFailed(request.request_id, request.attempt, side.incarnation, "enough")]

    async with liar(stack, lie) as side:
        side.pools = await pools_of(stack)
        for prompt, expected in right_answers[-12:]:
            assert await ask(stack, side, prompt) == expected


# As a router, to decode


async def test_router_that_asks_for_anything_gets_an_answer_or_is_lost(stack: Stack) -> None:
    batches: list[list[Generate]] = []

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(messages(Generate), max_size=8))
    def collect(batch: list[Generate]) -> None:
        batches.append(batch)

    collect()
    for number, batch in enumerate(batches):
        channel = ClientChannel(
            address_of(stack, "decode-0"),
            keys=stack.keys.of("router"),
            server="decode",
            hello=Hello(name="router", incarnation=Incarnation(f"r{number}")),
        )
        await channel.connect()
        for message in batch:
            channel.send(msgspec.structs.replace(message, prefill=None))
        try:
            async with asyncio.timeout(0.05):
                while True:
                    await channel.receive()
        except (TimeoutError, PeerLostError):
            channel.close()
