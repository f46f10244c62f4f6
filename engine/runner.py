"""Runs one step at a time on one model: openings, forward, sampling, and its completion."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from core.errors import InternalError
from core.ids import Slot, StepSeq
from core.sampling import SamplingParams, TokenLogprobs
from engine.batch import (
    SampledToken,
    SequenceInput,
    SlotOpening,
    StepBatch,
    StepOutput,
)
from engine.forward import PagedModel
from engine.layer_progress import LayerProgress
from engine.logprobs import StepLogprobs, copy_raw, logprobs_of, to_values
from engine.plan import build_plan
from engine.rank_group import LEADER, RankGroup
from engine.sampler import sample
from engine.slots import SlotTable

_WARM_UP_TOKENS = 8
OnLayers = Callable[[int], None]
"""Told of a layer when it, and all before it, are complete on the device."""


def _ignore_layers(_mark: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class _DeviceClock:
    """Events of one step. Never recorded again: a late waiter must not meet another step."""

    started: torch.cuda.Event
    ended: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What a step sampled; tensors are [R], for the R sampled rows."""

    tokens: torch.Tensor
    is_damaged: torch.Tensor
    """Whether the row's logits hold a NaN."""
    logprob_rows: NDArray[np.int64]
    """Rows that ask for log-probabilities."""
    logprobs: StepLogprobs | None
    """Of these rows, if there are any."""

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "_Sampled":
        """Return the same with every tensor moved."""
        return _Sampled(
            tokens=move(self.tokens),
            is_damaged=move(self.is_damaged),
            logprob_rows=self.logprob_rows,
            logprobs=None if self.logprobs is None else self.logprobs.map(move),
        )


class _DeviceMarks:
    """Events of one step behind its marked layers, in their order; as those of ``_DeviceClock``."""

    def __init__(self, on_layers: OnLayers) -> None:
        self._on_layers = on_layers
        self._events: list[tuple[int, torch.cuda.Event]] = []

    def record(self, mark: int) -> None:
        """The device was given everything up to layer ``mark``."""
        self._events.append((mark, _recorded_event()))

    def wait(self) -> None:
        """Report each mark once the device has reached it."""
        for mark, event in self._events:
            event.synchronize()
            self._on_layers(mark)


class PendingStep:
    """A step whose work is on the device; its results are read by ``wait``."""

    def __init__(
        self,
        batch: StepBatch,
        sampled: _Sampled,
        completion: _DeviceClock | float,
        marks: "_DeviceMarks | None" = None,
    ) -> None:
        self.step: StepSeq = batch.step
        self._marks = marks
        self._slots = [sequence.slot for sequence in batch.sequences if sequence.sample]
        self._sampled = sampled
        self._completion = completion

    def wait(self) -> StepOutput:
        """Return the output once the device has completed the step; sleeps, never spins.

        Has no deadline: only the event proves that the step writes no more.

        Raises:
            InternalError: the model gave logits that are not numbers, so it or its KV is damaged.
        """
        if self._marks is not None:
            self._marks.wait()
        if isinstance(self._completion, _DeviceClock):
            self._completion.ended.synchronize()
            duration_s = self._completion.started.elapsed_time(self._completion.ended) / 1e3
        else:
            duration_s = self._completion
        _require_numbers(self._sampled.is_damaged, self._slots)
        logprobs = self._logprobs_by_row()
        tokens = tuple(
            SampledToken(slot=slot, token_id=token_id, logprobs=logprobs.get(row))
            for row, (slot, token_id) in enumerate(
                zip(self._slots, self._sampled.tokens.tolist(), strict=True)
            )
        )
        return StepOutput(step=self.step, tokens=tokens, duration_s=duration_s)

    def _logprobs_by_row(self) -> dict[int, TokenLogprobs]:
        logprobs = self._sampled.logprobs
        if logprobs is None:
            return {}
        return dict(zip(self._sampled.logprob_rows.tolist(), to_values(logprobs), strict=True))


class ModelRunner:
    """One model and the slots of its sequences. Used by one thread at a time."""

    def __init__(self, model: PagedModel, *, max_num_seqs: int) -> None:
        self._model = model
        self._slots = SlotTable(
            num_slots=max_num_seqs, vocab_size=model.spec.vocab_size, device=model.device
        )

    @property
    def is_asynchronous(self) -> bool:
        """Whether ``launch`` returns before the step has completed."""
        return self._model.device.type == "cuda"

    def run(self, batch: StepBatch) -> StepOutput:
        """Run ``batch`` to its end."""
        return self.launch(batch).wait()

    @torch.inference_mode()
    def launch(self, batch: StepBatch, on_layers: OnLayers = _ignore_layers) -> PendingStep:
        """Put ``batch`` on the device, after everything launched before. On a CPU it is done then.

        ``on_layers`` is told of each of the batch's marks that the model reports, in order, when
        the device has completed that layer and all before it: here, or by ``PendingStep.wait``. It
        must not raise.

        Raises:
            InternalError: the batch names a slot or block that it must not, or (on a CPU) as
                ``PendingStep.wait``.
        """
        started_s = time.perf_counter()
        started = _recorded_event() if self.is_asynchronous else None
        for opening in batch.openings:
            self._slots.open(opening)
        self._model.kv_pool.zero(batch.zero_blocks)
        marks = None
        if batch.layer_marks and self.is_asynchronous:
            marks = _DeviceMarks(on_layers)
            on_layers = marks.record
        logits = self._forward(batch, on_layers)
        sampled = self._sample(
            logits, [sequence for sequence in batch.sequences if sequence.sample]
        )
        if started is None:
            return PendingStep(batch, sampled, time.perf_counter() - started_s)
        clock = _DeviceClock(started, _recorded_event())
        return PendingStep(batch, sampled.map(_to_host), clock, marks)

    def drain(self) -> None:
        """Return when the device runs nothing any more."""
        if self.is_asynchronous:
            torch.cuda.synchronize(self._model.device)

    def warm_up(self) -> None:
        """Run a small prefill and a decode step, so that the first request finds all caches warm.

        Call before the first step. The pool's bytes are as before when it returns.
        """
        layout = self._model.kv_pool.layout
        num_blocks = layout.num_blocks_for(_WARM_UP_TOKENS + 1)
        groups = range(len(layout.groups))
        needed = num_blocks * len(groups)
        if needed > self._model.kv_pool.num_blocks:
            return
        tables = tuple(
            np.arange(group * num_blocks, (group + 1) * num_blocks, dtype=np.int32)
            for group in groups
        )
        blocks = self._model.kv_pool.blocks[:needed]
        saved = blocks.clone()
        self._run_warm_up(tables)
        self.drain()
        blocks.copy_(saved)

    def _run_warm_up(self, tables: tuple[NDArray[np.int32], ...]) -> None:
        slot = Slot(0)
        prompt = [0] * _WARM_UP_TOKENS
        sampling = SamplingParams(seed=0, max_tokens=2, temperature=0.7, top_p=0.9, logprobs=1)
        opening = SlotOpening(slot=slot, sampling=sampling, prompt_token_ids=prompt)
        prefill = SequenceInput(
            slot=slot, token_ids=prompt, position=0, block_tables=tables, sample=True
        )
        decode = SequenceInput(
            slot=slot, token_ids=None, position=len(prompt), block_tables=tables, sample=True
        )
        self.run(StepBatch(step=StepSeq(0), openings=(opening,), sequences=(prefill,)))
        self.run(StepBatch(step=StepSeq(0), openings=(), sequences=(decode,)))

    def _forward(self, batch: StepBatch, on_layers: OnLayers) -> torch.Tensor:
        plan = build_plan(batch.sequences, self._model.kv_pool.layout, device=self._model.device)
        if len(plan.device_rows):
            plan.token_ids[plan.device_rows] = self._slots.last_tokens[plan.device_slots]
        if not batch.layer_marks:
            return self._model.forward(plan)
        return self._model.forward(plan, LayerProgress(batch.layer_marks, on_layers))

    def _sample(self, logits: torch.Tensor, sampled: Sequence[SequenceInput]) -> _Sampled:
        slots = np.array([sequence.slot for sequence in sampled], np.int64)
        positions = np.array([each.position + each.num_tokens for each in sampled], np.int64)
        group = self._model.group
        if group is not None and group.rank != LEADER:
            return self._take_sampled(group, slots, positions)
        # One pass: a sum is NaN where an addend is.
        is_damaged = logits.sum(dim=-1).isnan()
        if not self.is_asynchronous:
            _require_numbers(is_damaged, slots.tolist())
        rows = self._slots.rows(slots, positions)
        (wanted, num_top) = self._slots.logprobs_wanted(slots)
        raw = copy_raw(logits, wanted, num_top) if len(wanted) else None
        tokens = sample(logits, rows, self._slots.history)
        if group is not None and len(slots):
            group.broadcast(tokens)
        device_slots = torch.from_numpy(slots).to(logits.device, non_blocking=True)
        self._slots.record(device_slots, rows, tokens)
        return _Sampled(
            tokens=tokens,
            is_damaged=is_damaged,
            logprob_rows=wanted,
            logprobs=None if raw is None else logprobs_of(raw, tokens),
        )

    def _take_sampled(
        self, group: RankGroup, slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> _Sampled:
        """Keep what the leader has sampled, so that the slots are the same on all ranks."""
        tokens = torch.zeros(len(slots), dtype=torch.int64, device=self._model.device)
        if len(slots):
            group.broadcast(tokens)
        device_slots = torch.from_numpy(slots).to(tokens.device, non_blocking=True)
        self._slots.record(device_slots, self._slots.rows(slots, positions), tokens)
        return _Sampled(
            tokens=tokens,
            is_damaged=torch.zeros_like(tokens, dtype=torch.bool),
            logprob_rows=np.empty(0, np.int64),
            logprobs=None,
        )


def _require_numbers(is_damaged: torch.Tensor, slots: Sequence[int]) -> None:
    damaged = [slot for slot, is_nan in zip(slots, is_damaged.tolist(), strict=True) if is_nan]
    if damaged:
        raise InternalError(f"the model gave NaN logits for slots {damaged}")


def _recorded_event() -> torch.cuda.Event:
    # Blocking: a waiter sleeps instead of spinning on a core.
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


def _to_host(values: torch.Tensor) -> torch.Tensor:
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)
