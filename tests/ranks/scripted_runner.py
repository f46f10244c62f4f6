"""A leader's own runner whose steps end at once."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from core.ids import StepSeq
from engine.batch import StepBatch, StepOutput

OUTPUT = StepOutput(step=StepSeq(7), tokens=(), duration_s=0.0)


@dataclass
class ScriptedStep:
    step: StepSeq

    def wait(self) -> StepOutput:
        return replace(OUTPUT, step=self.step)


@dataclass
class ScriptedRunner:
    is_asynchronous: bool = False
    marks: list[int] = field(default_factory=list)
    is_drained: bool = False

    def launch(self, batch: StepBatch, on_layers: Callable[[int], None]) -> ScriptedStep:
        for mark in batch.layer_marks:
            on_layers(mark)
        return ScriptedStep(batch.step)

    def drain(self) -> None:
        self.is_drained = True
