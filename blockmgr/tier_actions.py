"""The queue between what decides on copies and what carries them out."""

import itertools
from collections import deque

from core.ids import OperationId
from core.tiers import TierAction


class TierActions:
    """Numbers operations and keeps their actions in order until they are taken.

    Operations count down from -1: reads of a transfer count up, so the two never meet in one
    block manager.
    """

    def __init__(self) -> None:
        self._operations = map(OperationId, itertools.count(-1, -1))
        self._actions: deque[TierAction] = deque()

    def new_operation(self) -> OperationId:
        """Return an operation that was never used."""
        return next(self._operations)

    def append(self, action: TierAction) -> None:
        """``action`` must be carried out, after those before it have been begun."""
        self._actions.append(action)

    def take(self) -> list[TierAction]:
        """Return what must be carried out, in order, once."""
        actions = list(self._actions)
        self._actions.clear()
        return actions
