"""How the KV of a prompt's last chunk is cut: first layers are read while others compute.

Two ways, by where the groups have their layers (by the number of the layer in the model):

    groups  (0 2 4 6) (1 3 5 7)     all groups, some layers      ranges of one chunk
    groups  (0 1) (2 3) (4 5) (6 7) some groups, all layers      chunks of their own
"""

from collections.abc import Sequence
from dataclasses import dataclass

from core.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of every position's KV."""

    groups: tuple[int, ...]
    """Ascending."""
    first_layer: int
    last_layer: int
    """Inclusive; of each of the groups."""

    def joined(self, others: "Sequence[Cut]") -> "Cut":
        """Return this and the cuts that follow it as one."""
        cuts = (self, *others)
        return Cut(
            groups=tuple(sorted({group for cut in cuts for group in cut.groups})),
            first_layer=self.first_layer,
            last_layer=cuts[-1].last_layer,
        )


@dataclass(frozen=True, slots=True)
class CutPlan:
    """How a layout is cut."""

    marks: tuple[int, ...]
    """Layers of the model, ascending: of each cut but the last, when it is complete."""
    cuts: tuple[Cut, ...]
    """The last one is complete with the step."""

    @property
    def is_by_layers(self) -> bool:
        """Whether every cut has all groups."""
        return all(cut.groups == self.cuts[0].groups for cut in self.cuts)

    @classmethod
    def of(cls, layout: KVLayout, num_cuts: int) -> "CutPlan":
        """Return the way of cutting into at most ``num_cuts`` parts that leaves less for the end.

        Nothing is cut at the model's last layer: that part would be complete just as late.
        """
        last_equal_mark = (_last_layer(layout) + 1) * (num_cuts - 1) // num_cuts - 1
        plans = (_by_layers(layout, num_cuts), _by_groups(layout, num_cuts))
        return min(plans, key=lambda plan: plan.num_late_parts(last_equal_mark))

    def num_late_parts(self, mark: int) -> int:
        """Count the (group, layer) pairs that no mark up to ``mark`` completes."""
        num_early = sum(early <= mark for early in self.marks)
        return sum(
            len(cut.groups) * (cut.last_layer - cut.first_layer + 1)
            for cut in self.cuts[num_early:]
        )


def _by_layers(layout: KVLayout, num_cuts: int) -> CutPlan:
    groups, num_layers = tuple(range(len(layout.groups))), layout.layers_per_group
    end_of_mark: dict[int, int] = {}
    for count in range(1, num_cuts):
        end = num_layers * count // num_cuts
        if end:
            end_of_mark[max(group.layers[end - 1] for group in layout.groups)] = end
    end_of_mark.pop(_last_layer(layout), None)
    ends = [*end_of_mark.values(), num_layers]
    starts = [0, *end_of_mark.values()]
    cuts = [Cut(groups, start, end - 1) for start, end in zip(starts, ends, strict=True)]
    return CutPlan(tuple(end_of_mark), tuple(cuts))


def _by_groups(layout: KVLayout, num_cuts: int) -> CutPlan:
    num_layers = _last_layer(layout) + 1
    left = set(range(len(layout.groups)))
    marks: list[int] = []
    cuts: list[Cut] = []
    for count in range(1, num_cuts):
        mark = num_layers * count // num_cuts - 1
        complete = {group for group in left if max(layout.groups[group].layers) <= mark}
        if complete and complete != left:
            marks.append(max(max(layout.groups[group].layers) for group in complete))
            cuts.append(_whole(layout, complete))
            left -= complete
    return CutPlan(tuple(marks), (*cuts, _whole(layout, left)))


def _whole(layout: KVLayout, groups: set[int]) -> Cut:
    return Cut(tuple(sorted(groups)), 0, layout.layers_per_group - 1)


def _last_layer(layout: KVLayout) -> int:
    return max(layer for group in layout.groups for layer in group.layers)
