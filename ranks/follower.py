"""A follower: the process of every rank but the leader's. It decides nothing."""

import asyncio
import logging
import os
import signal
import socket
import threading
from functools import partial

import torch

from core.errors import ConfigError, StepFailedError, TransferError
from core.ids import StepSeq
from core.logs import set_up_logging
from core.parent import die_with_parent
from core.tasks import run_until
from engine.batch import StepBatch, StepOutput
from engine.executor import StepExecutor
from engine.rank_group import RankGroup, RankPlace
from engine.startup import Engine, start_engine
from ranks.devices import VISIBLE_DEVICES, visible_device
from ranks.frames import FrameChannel, receive_frame, send_frame
from ranks.messages import (
    Cancel,
    Connect,
    Ended,
    Load,
    Loaded,
    Meet,
    Ping,
    Pong,
    Post,
    RankSpec,
    Serve,
    Started,
    StartFailed,
    StepDone,
    TearDown,
    WarmUp,
)
from ranks.rank_transfers import RankSource, open_rank_reads, staging_nbytes
from transfer.reads import ReadEnd, Reads
from transfer.stats import TransferStats

log = logging.getLogger(__name__)

EXIT_LEADER_GONE = 0
EXIT_CRASHED = 1


def run_follower(spec: RankSpec, steps: socket.socket, transfers: socket.socket) -> None:
    """Run in a process of its own, for as long as the leader holds the other ends.

    Ends at once, in whatever it is, when the leader is gone: nobody waits for its results then,
    and a rank alone would wait in a collective.
    """
    die_with_parent()
    # An interrupt from a terminal comes to the whole group: the leader ends this rank in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ[VISIBLE_DEVICES] = visible_device(os.environ.get(VISIBLE_DEVICES), spec.rank)
    config = spec.config
    set_up_logging(
        config.log_level,
        worker=f"{spec.worker}-rank-{spec.rank}",
        role=spec.role,
        log_format=config.log_format,
    )
    try:
        engine = _start(spec, steps)
        asyncio.run(_serve(spec, engine, steps, transfers))
    except ConnectionError:
        _exit(EXIT_LEADER_GONE)
    except Exception:
        log.exception("rank crashed")
        _exit(EXIT_CRASHED)


def _start(spec: RankSpec, steps: socket.socket) -> Engine:
    """Load this rank's part and warm it up, together with the others.

    Raises:
        OSError: the leader is gone.
        Exception: this rank cannot start; the leader knows.
    """

    def join(device: torch.device) -> RankGroup:
        send_frame(steps, Loaded())
        _await(steps, Meet)
        return RankGroup.join(spec.store, rank=spec.rank, size=spec.num_ranks, device=device)

    place = RankPlace(rank=spec.rank, num_ranks=spec.num_ranks, join=join)
    _await(steps, Load)
    try:
        return start_engine(
            spec.model_path,
            spec.config,
            place=place,
            staging_nbytes=staging_nbytes(spec.config.transfer, spec.role),
        )
    except OSError:
        raise
    except Exception as error:
        send_frame(steps, StartFailed(str(error), is_final=isinstance(error, ConfigError)))
        raise


def _await(steps: socket.socket, kind: type[Load | Meet]) -> None:
    # Waits without a deadline: the leader's end closes the socket.
    if not isinstance(message := receive_frame(steps), kind):
        raise ConnectionAbortedError(f"unexpected {message} instead of {kind.__name__}")


async def _serve(
    spec: RankSpec, engine: Engine, steps: socket.socket, transfers: socket.socket
) -> None:
    """Do what the leader says until this process is ended. Raises what broke."""
    transfer = _Transfers(spec, engine, transfers)
    send_frame(steps, Started(transfer.endpoint))
    thread = threading.Thread(target=_run_steps, args=(engine, steps), name="steps", daemon=True)
    thread.start()
    await run_until(asyncio.Event())


def _run_steps(engine: Engine, steps: socket.socket) -> None:
    """Run the leader's steps in order; the end of the connection ends the process."""
    executor = StepExecutor(engine.runner, partial(_report_step, steps))
    try:
        # Waits without a deadline: the leader's end closes the socket.
        while isinstance(batch := receive_frame(steps), StepBatch):
            executor.submit(batch)
        log.error("unexpected message=%s", batch)
    except OSError:
        _exit(EXIT_LEADER_GONE)
    _exit(EXIT_CRASHED)


def _report_step(steps: socket.socket, step: StepSeq, result: StepOutput | StepFailedError) -> None:
    failure = str(result) if isinstance(result, StepFailedError) else None
    try:
        send_frame(steps, StepDone(step, failure))
    except OSError:
        _exit(EXIT_LEADER_GONE)
    if failure is not None:
        # The others may be waiting for this rank in a sum: its end is what they notice at once.
        _exit(EXIT_CRASHED)


class _Transfers:
    """Carries this rank's part of transfers out."""

    def __init__(self, spec: RankSpec, engine: Engine, sock: socket.socket) -> None:
        self._channel = FrameChannel(
            sock, on_message=self._take, on_lost=partial(_exit, EXIT_LEADER_GONE)
        )
        self._reads: Reads | None = None
        self._source: RankSource | None = None
        config = spec.config.transfer
        if spec.role == "prefill":
            self._source = RankSource(engine, config, incarnation=spec.incarnation)
        elif spec.has_transfers:
            self._reads = open_rank_reads(
                engine,
                config,
                incarnation=spec.incarnation,
                stats=TransferStats(),  # the leader counts for all ranks
                on_end=self._end,
            )
        self.endpoint = None if self._source is None else self._source.endpoint()

    def _take(self, message: object) -> None:
        match message:
            case Ping():
                self._channel.send(Pong())
            case Serve(reader, active) if self._source is not None:
                self._source.serve(reader, active=active)
            case Connect() if self._reads is not None:
                self._connect(self._reads, message)
            case Post(read) if self._reads is not None:
                self._reads.post(read)
            case WarmUp(operation, source) if self._reads is not None:
                self._reads.warm_up(operation, source)
            case Cancel(operation) if self._reads is not None:
                self._reads.cancel(operation)
            case TearDown(source, reason) if self._reads is not None:
                self._reads.tear_down(source, reason)
            case _:
                log.error("dropped=%s", type(message).__name__)

    @staticmethod
    def _connect(reads: Reads, connect: Connect) -> None:
        try:
            reads.connect(connect.source, connect.welcome)
        except TransferError as error:
            # Reads from there end as failed, and so does the worker's whole read.
            log.warning("event=not_connected source=%s reason=%s", connect.source, error)

    def _end(self, end: ReadEnd) -> None:
        self._channel.send(Ended(end))


def _exit(code: int) -> None:
    logging.shutdown()
    os._exit(code)
