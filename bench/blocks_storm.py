"""A million short random requests through one block manager: what leaks, and how long blocks wait.

A decode worker's life without its model: requests share prefixes, are received or computed, grow by
a token per step with two steps in flight, end, or are aborted at any point; copies read some blocks
on after their release. Steps complete in order and operations in any.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter_ns

import numpy as np

from bench.blocks_draws import (
    DRAWN_AT_ONCE,
    NUM_PREFIXES,
    PREFIX_TOKENS,
    Draw,
    StormPlan,
    draws,
)
from bench.blocks_sluice import NAMESPACE, new_manager, new_owner
from bench.blocks_task import BLOCK_SIZE
from bench.blocks_waits import WaitClock
from blockmgr.receive_target import ReceiveTarget
from blockmgr.token_run import TokenRun
from core.errors import OutOfBlocksError
from core.ids import BlockId, OperationId, Owner, StepSeq

_VOCABULARY = 50_000
_FIRST_TOKEN = 7
_OVERLAP_DEPTH = 2


@dataclass(slots=True, eq=False)
class _Request:
    draw: Draw
    owner: Owner
    tokens: TokenRun
    num_prompt: int
    num_computed: int = 0
    num_settled: int = 0
    is_live: bool = True


@dataclass(slots=True)
class _Step:
    seq: StepSeq
    parts: list[tuple[_Request, int]] = field(default_factory=list[tuple[_Request, int]])


class Storm:
    """One run. Time is counted in steps."""

    def __init__(self, plan: StormPlan, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        self.waits = WaitClock(plan.num_blocks, now_ns)
        self.blocks = new_manager(plan.num_blocks, observers=(self.waits,))
        self.num_aborted = self.num_preempted = self.num_refused = self.num_ended = 0
        self._plan = plan
        self._draws = draws(plan)
        rng = np.random.default_rng(plan.seed + 1)
        size = plan.max_tokens + DRAWN_AT_ONCE
        self._text: list[int] = rng.integers(0, _VOCABULARY, size).tolist()
        self._prefixes: list[list[int]] = rng.integers(
            0, _VOCABULARY, (NUM_PREFIXES + 1, PREFIX_TOKENS)
        ).tolist()
        self._next: _Request | None = None
        self._running: dict[Owner, _Request] = {}
        self._num_receiving = 0
        self._in_flight: deque[_Step] = deque()
        self._due: dict[int, list[tuple[OperationId, _Request | None]]] = {}
        self._aborts: dict[int, list[_Request]] = {}
        self._operation = OperationId(0)

    def run(self) -> Iterator[int]:
        """Run to the end; yield after each step how many requests have ended."""
        self._next = self._draw()
        while self._next or self._running or self._num_receiving or self._in_flight or self._due:
            self.waits.steps += 1
            self._end_operations()
            self._abort()
            self._admit()
            self._dispatch()
            if len(self._in_flight) >= _OVERLAP_DEPTH or not self._running:
                self._complete()
            yield self.num_ended

    def _draw(self) -> _Request | None:
        draw = next(self._draws, None)
        if draw is None:
            return None
        num_prompt = draw.num_tokens - draw.num_outputs
        at = draw.serial % DRAWN_AT_ONCE
        own = self._text[at : at + num_prompt - draw.num_shared]
        own[0] = _VOCABULARY + draw.serial
        token_ids = self._prefixes[draw.prefix][: draw.num_shared] + own
        tokens = TokenRun(NAMESPACE, BLOCK_SIZE, token_ids)
        return _Request(draw, new_owner(draw.serial), tokens, num_prompt)

    def _admit(self) -> None:
        while (request := self._next) is not None:
            if len(self._running) + self._num_receiving >= self._plan.max_running:
                return
            try:
                self._start(request)
            except OutOfBlocksError:
                self.num_refused += 1
                return
            if request.draw.abort_after is not None:
                at = self.waits.steps + 1 + request.draw.abort_after
                self._aborts.setdefault(at, []).append(request)
            self._next = self._draw()

    def _start(self, request: _Request) -> None:
        blocks, num_prompt = self.blocks, request.num_prompt
        cached = blocks.count_cached_tokens(request.tokens, num_prompt - 1)
        target = ReceiveTarget(0, cached // BLOCK_SIZE, -(-(num_prompt - cached) // BLOCK_SIZE))
        blocks.admit(
            request.owner,
            tokens=request.tokens,
            num_cached_tokens=cached,
            num_tokens=cached if request.draw.is_received else num_prompt,
        )
        request.num_computed = request.num_settled = cached
        if not request.draw.is_received:
            self._running[request.owner] = request
            return
        operation = self._next_operation()
        try:
            blocks.begin_receive(request.owner, [target], operation)
        except OutOfBlocksError:
            blocks.release(request.owner)
            raise
        self._num_receiving += 1
        self._end_later(operation, request)

    def _dispatch(self) -> None:
        """Put every running request into a step; the youngest gives way where blocks are short."""
        parts: list[tuple[_Request, int]] = []
        for request in list(self._running.values()):
            if not request.is_live:
                continue
            count = max(request.num_prompt - request.num_computed, 1)
            if self._grow(request, request.num_computed + count):
                parts.append((request, count))
        parts = [part for part in parts if part[0].is_live]
        if not parts:
            return
        for request, count in parts:
            request.num_computed += count
        seq = self.blocks.dispatch_step(request.owner for request, _ in parts)
        self._in_flight.append(_Step(seq, parts))

    def _grow(self, request: _Request, num_tokens: int) -> bool:
        while True:
            try:
                self.blocks.grow(request.owner, num_tokens)
            except OutOfBlocksError:
                victim = next(reversed(self._running.values()))
                self.num_preempted += 1
                self._release(victim)
                if victim is request:
                    return False
            else:
                return True

    def _complete(self) -> None:
        if not self._in_flight:
            return
        step = self._in_flight.popleft()
        self.blocks.complete_step(step.seq)
        for request, count in step.parts:
            if not request.is_live:
                continue
            before = request.num_settled // BLOCK_SIZE
            request.num_settled += count
            if request.num_settled // BLOCK_SIZE > before:
                self.blocks.settle(request.owner, request.num_settled)
            request.tokens.extend((request.num_settled % _VOCABULARY,))
            if request.num_settled >= request.draw.num_tokens - 1:
                self._end(request)

    def _end(self, request: _Request) -> None:
        """End a request that is done, perhaps with a copy that goes on reading its blocks."""
        if request.draw.is_copied:
            (table,) = self.blocks.block_tables(request.owner)
            named = [BlockId(block_id) for block_id in table[: len(table) // 2 + 1].tolist()]
            operation = self._next_operation()
            self.blocks.begin_operation(request.owner, named, operation)
            self._end_later(operation, None)
        self._release(request)

    def _release(self, request: _Request) -> None:
        self.blocks.release(request.owner)
        self._running.pop(request.owner, None)
        request.is_live = False
        self.num_ended += 1

    def _abort(self) -> None:
        for request in self._aborts.pop(self.waits.steps, ()):
            if request.is_live:
                self.num_aborted += 1
                self._release(request)

    def _end_later(self, operation: OperationId, receiver: _Request | None) -> None:
        steps = receiver.draw.operation_steps if receiver else self._plan.max_operation_steps
        self._due.setdefault(self.waits.steps + steps, []).append((operation, receiver))

    def _end_operations(self) -> None:
        for operation, receiver in self._due.pop(self.waits.steps, ()):
            self.blocks.end_operation(operation)
            if receiver is None:
                continue
            self._num_receiving -= 1
            if receiver.is_live:
                receiver.num_computed = receiver.num_settled = receiver.num_prompt
                self.blocks.settle(receiver.owner, receiver.num_prompt)
                receiver.tokens.extend((_FIRST_TOKEN,))  # it comes with the last ticket
                self._running[receiver.owner] = receiver

    def _next_operation(self) -> OperationId:
        self._operation = OperationId(self._operation + 1)
        return self._operation
