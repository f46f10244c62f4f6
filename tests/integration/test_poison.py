"""A stale writer of a real pool ends the worker by one line that names it; a rightful one does not.

The writers are real: a NIC read over UCX whose source was frozen when somebody took "cancelled"
for "over", the device's views of the pool, and a step of a running decode worker.
"""

import os
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from blockmgr.fences import KVWriters
from blockmgr.receive_target import ReceiveTarget
from blockmgr.worker_blocks import WorkerBlocks
from core.config import SluiceConfig
from core.errors import MemoryCorruptionError
from core.ids import Attempt, Incarnation, OperationId, Owner, RequestId
from core.kv_layout import LayerSpec, group_layers
from engine.batch import StepBatch
from engine.kv_pool import KVPool
from engine.runner import PendingStep
from engine.startup import Engine
from tests.fork_server import forked_process
from tests.integration.models import VOCAB_SIZE, tiny_model
from tests.integration.requests import prompt_of
from tests.integration.stack import Member, Stack, run_member
from tests.transfer.source_process import SourceProcess
from transfer.nixl_transport import NixlTransport
from transfer.transport import Extent

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]

NUM_BLOCKS = 8
LAYOUT = group_layers(
    [LayerSpec(num_kv_heads=2, head_dim=64, window=None)] * 4, block_size=16, dtype="float32"
)
BLOCK = LAYOUT.block_nbytes
STALE, NEXT = (
    (RequestId("stale"), Attempt(2)),
    (RequestId("next"), Attempt(1)),
)
READ = OperationId(77)


@dataclass
class Worker:
    """A pool and what watches it, without a model."""

    pool: KVPool
    watched: WorkerBlocks

    def receive(self, owner: Owner, count: int, operation: OperationId) -> list[int]:
        blocks = self.watched.manager
        blocks.admit(owner, tokens=None, num_cached_tokens=0, num_tokens=0)
        (placed,) = blocks.begin_receive(owner, [ReceiveTarget(0, 0, count)], operation)
        return [block_id for block_id, _ in placed]

    def take_all(self) -> None:
        self.watched.manager.admit(
            NEXT, tokens=None, num_cached_tokens=0, num_tokens=NUM_BLOCKS * LAYOUT.block_size
        )


@pytest.fixture
def worker() -> Worker:
    pool = KVPool(LAYOUT, NUM_BLOCKS, device=torch.device("cpu"))
    watched = WorkerBlocks.make(
        LAYOUT,
        pool,
        SluiceConfig.parse({"cache": {"poison": True}}, source="test"),
        incarnation=Incarnation("00c0ffee00c0ffee"),
        writers=KVWriters.NONE,
        clock=time.monotonic,
    )
    return Worker(pool, watched)


@pytest.fixture
def source() -> Iterator[SourceProcess]:
    source = SourceProcess("source", NUM_BLOCKS * BLOCK, ucx_options={"TLS": "tcp"})
    yield source
    source.close()


@pytest.fixture
def transport(worker: Worker, source: SourceProcess) -> Iterator[NixlTransport]:
    transport = NixlTransport(Incarnation("reader"), ucx_options={"TLS": "tcp"})
    transport.register(worker.pool.address, worker.pool.nbytes)
    transport.connect(source.incarnation, source.endpoint)
    yield transport
    transport.close()


def wait_until_terminal(transport: NixlTransport) -> None:
    deadline = time.monotonic() + 60
    while not transport.poll():
        assert time.monotonic() < deadline, "the read is not terminal in time"
        select.select([], [], [], 0.001)


@pytest.mark.parametrize("is_proven", [True, False])
def test_i08_c21_a_read_that_lands_after_it_was_given_up_is_named(
    worker: Worker, source: SourceProcess, transport: NixlTransport, *, is_proven: bool
) -> None:
    # Given a read that is posted while its source is frozen, and a request that ends
    block_ids = worker.receive(STALE, 3, READ)
    source.freeze()
    transport.read(
        source.incarnation,
        [Extent(block_id * BLOCK, at * BLOCK, BLOCK) for at, block_id in enumerate(block_ids)],
    )
    worker.watched.manager.release(STALE)
    if not is_proven:
        worker.watched.manager.end_operation(READ)

    # When the source wakes and the bytes land
    source.wake()
    wait_until_terminal(transport)
    if is_proven:
        worker.watched.manager.end_operation(READ)
        worker.take_all()
        return

    # Then whoever takes the blocks is told, by block, owner and operation
    with pytest.raises(MemoryCorruptionError) as caught:
        worker.take_all()
    message = str(caught.value)
    assert any(f"block={block_id} generation=1" in message for block_id in block_ids)
    for part in ("offset=0", "'stale', 2", f"last_operation={READ}"):
        assert part in message, message


@pytest.mark.parametrize("is_fenced", [True, False])
def test_i08_b01_a_step_that_writes_after_its_request_ended_is_named(
    worker: Worker, *, is_fenced: bool
) -> None:
    # Given a request that ends while its step is on the device
    blocks = worker.watched.manager
    blocks.switch_fences(enabled=is_fenced)
    blocks.admit(STALE, tokens=None, num_cached_tokens=0, num_tokens=40)
    tables = blocks.block_tables(STALE)[0].tolist()
    step = blocks.dispatch_step([STALE])
    blocks.release(STALE)

    # When the step writes the token at position 39, in its last layer
    worker.pool.values[3][tables[2], 39 % 16] = 0.5
    blocks.complete_step(step)

    # Then the fence has kept the block until now; without it the writer is named
    if is_fenced:
        worker.take_all()
        return
    with pytest.raises(MemoryCorruptionError, match=r"last_owner=.*'stale', 2") as caught:
        worker.take_all()
    offset = (3 * 2 + 1) * BLOCK // 8 + (39 % 16) * BLOCK // 8 // 16
    assert f"block={tables[2]} generation=1 at offset={offset} " in str(caught.value)


def run_sabotaged(member: Member, log: Path) -> None:
    """Run a decode worker whose eighth step writes a byte of a block that is free."""
    from ranks import leader  # noqa: PLC0415 - in the member's process only

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    start_engine = leader.start_engine

    def start_sabotaged(path: Path, config: SluiceConfig, **options: Any) -> Engine:
        engine = start_engine(path, config, **options)
        launch = engine.runner.launch

        def launch_and_write(batch: StepBatch, on_layers: Callable[[int], None]) -> PendingStep:
            if batch.step == 8:
                engine.pool.blocks[-1, 5] ^= 1
            return launch(batch, on_layers)

        engine.runner.launch = launch_and_write  # type: ignore[method-assign]
        return engine

    leader.start_engine = start_sabotaged
    run_member(member)


class SabotagedStack(Stack):
    """One router and one decode worker, which has a stale writer."""

    log: Path

    def start(self, name: str) -> None:
        if name == "router":
            super().start(name)
            return
        process = forked_process(run_sabotaged, (self._members[name], self.log))
        process.start()
        self.processes[name] = process


def test_i08_a_worker_ends_by_one_line_that_names_the_write(tmp_path: Path) -> None:
    SabotagedStack.log = tmp_path / "decode.log"
    with SabotagedStack.open(
        tiny_model("llama", tmp_path),
        model={"dtype": "float32"},
        cache={"num_blocks": 24, "poison": True, "prefix_caching": False},
        deploy={"prefill": 0},
        router={"max_attempts": 1, "request_timeout_s": 100.0},
    ) as stack:
        with httpx.Client(base_url=stack.url, timeout=120) as client:
            prompt = prompt_of(300, VOCAB_SIZE)
            body = {"model": "model", "prompt": prompt, "max_tokens": 80, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 503
        process = stack.processes["decode-0"]
        process.join(60)
        assert process.exitcode == 1
    lines = SabotagedStack.log.read_text().splitlines()
    (line,) = [line for line in lines if "MemoryCorruptionError: " in line]
    for part in ("block=23 generation=0 ", "offset=4 ", "last_owner="):
        assert part in line
