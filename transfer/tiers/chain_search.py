"""How far a chain of names goes in a storage that answers one name at a time."""

import asyncio
from collections.abc import Awaitable, Callable


async def count_leading(
    exists: Callable[[int], Awaitable[bool]], length: int, *, width: int
) -> int:
    """Return how many of ``length`` names exist, from the first on.

    Names are written in order, so where one exists its predecessors mostly do: a gap is not
    noticed here, but when the block is read. Asks for the first name alone, because most chains
    are not there at all, and then for ``width`` names at once, spread over what is unknown.
    """
    if not length or not await exists(0):
        return 0
    low, high = 1, length  # the first `low` exist; `high` does not, or is the end
    while low < high:
        step = max(1, (high - low) // width)
        asked = range(low + step - 1, high, step)[:width]
        answers = await asyncio.gather(*map(exists, asked))
        for index, is_there in zip(asked, answers, strict=True):
            if not is_there:
                high = index
                break
            low = index + 1
    return low
