"""Where the layers of a group are cut, so that the first ones can be read while others compute."""

from core.kv_layout import KVLayout


def layers_complete_at(layout: KVLayout, num_ranges: int) -> dict[int, int]:
    """Return, by marked layer of the model, the last layer of *every* group that is complete then.

    Cuts each group's layers into ``num_ranges`` equal ranges. The last one has no mark, as it is
    complete with the step. Nor have those that are complete just as late: groups may take their
    first layers from the end of the model. Both ascend.
    """
    num_layers = layout.layers_per_group
    ends = [num_layers * count // num_ranges - 1 for count in range(1, num_ranges)]
    by_mark = {max(group.layers[end] for group in layout.groups): end for end in ends if end >= 0}
    last = max(layer for group in layout.groups for layer in group.layers)
    return {mark: end for mark, end in by_mark.items() if mark < last}
