"""Ranks run one step together, or the worker ends: none may hang, and none may be left behind.

Real processes, killed and frozen. A rank that is alone in a collective would wait for ever; a
leader that goes on without a rank would give words computed from half of the heads.
"""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM

from core.errors import ConfigError, InternalError, StepFailedError
from engine.batch import StepBatch, StepOutput
from ranks import channels
from ranks.ranked_runner import RankedRunner
from tests.engine.texts import GREEDY, NUM_TOKENS, batches, generated, text
from tests.engine.tiny_models import make_tiny_model
from tests.ranks.scripted_runner import ScriptedRunner
from tests.ranks.worker_ranks import DEADLINE_S, LOST, Steps, followers, started

ROOT = Path(__file__).parents[2]
PROMPT = list(range(3, 43))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def steps_of_one_text() -> Iterator[StepBatch]:
    return batches([text(0, PROMPT, GREEDY)], chunk=7, count=NUM_TOKENS)


def leftovers(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_greedy_text_of_two_processes_equals_generate(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with started(model) as ranks:
        assert not leftovers(tmp_path), "a leader that is killed would leave it"
        assert ranks.engine.compatibility.tensor_parallel_size == 2
        assert ranks.engine.compatibility.total_kv_heads == 2
        assert ranks.engine.layout.num_kv_heads == 1
        steps = Steps(ranks)
        all_steps = list(steps_of_one_text())
        steps.submit(all_steps)
        outputs = [steps.next() for _ in all_steps]
        steps.close()
    tokens: list[int] = []
    for output in outputs:
        assert isinstance(output, StepOutput)
        tokens += [token.token_id for token in output.tokens]
    reference = AutoModelForCausalLM.from_pretrained(model)
    assert tokens == generated(reference, PROMPT, count=NUM_TOKENS)


@pytest.mark.slow
async def test_ranks_that_load_in_turn_start_alike(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranks.followers.loads_at_once", lambda *_, **__: False)
    async with started(model) as ranks:
        steps = Steps(ranks)
        steps.submit([next(steps_of_one_text())])
        assert isinstance(steps.next(), StepOutput)
        steps.close()


async def test_a13_a_rank_killed_in_mid_step_fails_the_step_and_all_behind_it(model: Path) -> None:
    """Its step is reported only when no rank writes any more."""
    async with started(model) as ranks:
        watching = asyncio.create_task(ranks.watch())
        await asyncio.sleep(0)
        (follower,) = followers()
        steps = Steps(ranks)
        (first, second, third, *_) = steps_of_one_text()
        steps.submit([first])
        assert isinstance(steps.next(), StepOutput)
        follower.send_signal(signal.SIGSTOP)
        steps.submit([second, third])  # the leader waits in its first sum
        follower.kill()
        results = [await asyncio.to_thread(steps.next) for _ in range(2)]
        assert all(isinstance(result, StepFailedError) for result in results)
        assert not follower.is_running()
        with pytest.raises(StepFailedError, match="refused"):
            steps.submit([first])
        with pytest.raises(InternalError, match=LOST):
            await asyncio.wait_for(watching, DEADLINE_S)
        steps.close()


@pytest.mark.slow
async def test_a13_a_rank_frozen_in_mid_step_fails_the_step_within_the_bound(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended, so that it does not wake up and write into what is someone else's by then."""
    monkeypatch.setattr("engine.rank_group.COLLECTIVE_TIMEOUT_S", 10.0)
    async with started(model) as ranks:
        (follower,) = followers()
        steps = Steps(ranks)
        follower.send_signal(signal.SIGSTOP)
        steps.submit([next(steps_of_one_text())])
        result = await asyncio.to_thread(steps.next)
        assert isinstance(result, StepFailedError)
        assert not follower.is_running()
        steps.close()


@pytest.mark.slow
async def test_a_rank_that_ends_while_nothing_runs_ends_the_worker(model: Path) -> None:
    async with started(model) as ranks:
        watching = asyncio.create_task(ranks.watch())
        await asyncio.sleep(0)
        (follower,) = followers()
        follower.kill()
        with pytest.raises(InternalError, match=LOST):
            await asyncio.wait_for(watching, DEADLINE_S)


@pytest.mark.slow
async def test_a_rank_whose_part_of_a_step_fails_says_why_and_ends(model: Path) -> None:
    """It ends, because the leader may be waiting for it in a sum, where nothing can be said."""
    async with started(model) as ranks:
        assert ranks._followers is not None
        (follower,) = ranks._followers
        (batch, *_) = batches([text(99, PROMPT, GREEDY)], chunk=64, count=1)  # there are 6 slots
        step = RankedRunner(ScriptedRunner(), ranks._followers).launch(batch, lambda _: None)
        with pytest.raises(InternalError, match="rank 1: step 1 failed: slot 99 of 6"):
            step.wait()
        follower.process.join(DEADLINE_S)
        assert follower.process.exitcode == 1


async def test_a_rank_that_freezes_while_nothing_runs_ends_the_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next request would be the one to find out, and wait for a collective's end."""
    bound = channels.MAX_UNANSWERED
    monkeypatch.setattr("ranks.channels.PING_INTERVAL_S", 0.2)
    monkeypatch.setattr("ranks.channels.MAX_UNANSWERED", 10_000)  # however late the answers are
    async with started(model) as ranks:
        assert ranks._channels is not None
        unanswered = ranks._channels._num_unanswered
        pings: list[object] = []
        send = ranks._channels.send
        monkeypatch.setattr(
            ranks._channels, "send", lambda command: (pings.append(command), send(command))
        )
        watching = asyncio.create_task(ranks.watch())
        # All is well beyond as many pings as a frozen rank is given: each answer counts for all.
        async with asyncio.timeout(DEADLINE_S):
            while len(pings) <= 2 * bound or unanswered[1] >= bound:
                assert not watching.done()
                await asyncio.sleep(0.01)
        (follower,) = followers()
        monkeypatch.setattr("ranks.channels.MAX_UNANSWERED", bound)
        follower.send_signal(signal.SIGSTOP)
        with pytest.raises(InternalError, match=r"ranks \[1\] of this worker do not answer"):
            await asyncio.wait_for(watching, DEADLINE_S)


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [False, True], ids=["running", "frozen"])
def test_no_rank_outlives_its_leader(model: Path, *, is_frozen: bool) -> None:
    """Not even one that cannot notice anything."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.ranks.leader_process", str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as leader:
        assert leader.stdout is not None
        (rank,) = map(psutil.Process, json.loads(leader.stdout.readline()))
        if is_frozen:
            rank.send_signal(signal.SIGSTOP)
        leader.kill()
        leader.wait(DEADLINE_S)
    _, alive = psutil.wait_procs([rank], timeout=DEADLINE_S)
    assert not alive


async def test_a_model_that_cannot_be_split_stops_the_start_and_leaves_no_rank(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model("gpt_oss", tmp_path / "model")
    with pytest.raises(ConfigError, match="use tensor_parallel_size: 1"):
        async with started(folder):
            pass
    assert not followers()


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"cache": {"host_tier_gib": 1.0}}, "cache.host_tier_gib=1.0"),
        ({"cache": {"poison": True}}, "cache.poison=True"),
        ({"transfer": {"checksums": True}}, "transfer.checksums=True"),
        ({"kv_groups": {"head_window": {"window": 8, "ratio": 0.5}}}, "kv_groups.head_window"),
    ],
)
async def test_what_ranks_do_not_do_is_refused_with_field_and_fix(
    tmp_path: Path, sections: dict[str, dict[str, object]], field: str
) -> None:
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=2: .* tensor_parallel_size: 1"
    ) as error:
        async with started(tmp_path, **sections):
            pass
    assert field in str(error.value)
    # On one rank nothing is refused: the folder is what is wrong then.
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        async with started(tmp_path, **sections, engine={"tensor_parallel_size": 1}):
            pass
