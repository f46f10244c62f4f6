"""Which layers of a forward are complete while later ones still compute."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from engine.layer_recognition import decoder_layers


class LayerProgress:
    """Tells when the marked layers of one forward are complete, each once and in order.

    Complete is a layer as the forward gives work to the device: on a CPU it is done, on an
    accelerator ``reached`` records an event behind it.
    """

    def __init__(self, marks: Sequence[int], reached: Callable[[int], None]) -> None:
        """Begin a forward.

        Args:
            marks: Layers of the model, ascending.
            reached: Called with a mark when it and all layers before it are complete. It must not
                raise: compiled layers call it.
        """
        self._marks = tuple(marks)
        self._reached = reached

    def marks_in(self, layers: range) -> tuple[int, ...]:
        """Return the marks among ``layers`` that were not reached yet."""
        return tuple(mark for mark in self._marks if mark in layers)

    def complete(self, layer: int) -> None:
        """``layer`` and all before it are complete."""
        reached = [mark for mark in self._marks if mark <= layer]
        self._marks = self._marks[len(reached) :]
        for mark in reached:
            self._reached(mark)


def report_layers(module: nn.Module, num_layers: int) -> None:
    """Let each decoder layer of ``module`` report to the forward's ``layer_progress``.

    Compiled layers do it themselves. A model whose layers are not found reports nothing.
    """
    for index, layer in enumerate(decoder_layers(module, num_layers) or ()):
        if not getattr(layer, "reports_layers", False):
            layer.register_forward_hook(partial(_report, index), with_kwargs=True)


def _report(
    index: int,
    _layer: nn.Module,
    _args: tuple[Any, ...],
    kwargs: dict[str, Any],
    _output: Any,  # noqa: ANN401  # a tensor or a tuple, by family
) -> None:
    progress: LayerProgress | None = kwargs.get("layer_progress")
    if progress is not None:
        progress.complete(index)
