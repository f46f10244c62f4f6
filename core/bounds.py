"""What numbers and texts in a message may be: checked while it is decoded, before anybody sees it.

Whoever receives a message may rely on these and need not ask again. Wide enough for everything that
a worker of ours says, and narrow enough that no arithmetic on them overflows, divides by zero or
fills memory. NaN and the infinities are outside of every range.
"""

from typing import Annotated, Final

from msgspec import Meta

MAX_COUNT: Final = 2**31 - 1
"""Block ids and token positions are 32 bits wide."""
MAX_SECONDS: Final = 366.0 * 24 * 3600
MAX_TOKENS: Final = 2**22
"""Of one request."""
MAX_CHUNKS: Final = 2**20
MAX_REQUESTS: Final = 2**16
"""Named in one message."""
MAX_RANKS: Final = 1024
MAX_LAYERS: Final = 2**14
MAX_GROUPS: Final = 2**14
MAX_EXPLANATION: Final = 2**18
"""Characters. Who passes on what another has said, and adds to it, has to cut it."""

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Total = Annotated[int, Meta(ge=0, le=2**62)]
"""Bytes, or events since a process's start."""
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS)]

Layer = Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]
Head = Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]
Group = Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
Chunk = Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)]

Name = Annotated[str, Meta(max_length=256)]
"""Of a worker, a model, an address, a salt."""
Line = Annotated[str, Meta(max_length=1024)]
"""For an operator, to be shown among others."""
Explanation = Annotated[str, Meta(max_length=MAX_EXPLANATION)]
"""For an operator; may list two layouts of many groups."""
Digest = Annotated[bytes, Meta(max_length=64)]
