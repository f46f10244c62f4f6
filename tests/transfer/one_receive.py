"""One request R whose read is under way."""

from blockmgr.states import BlockState
from tests.transfer.two_sides import DecodeSide, PrefillSide, owner

R = owner("r")


def start(decode: DecodeSide, prefill: PrefillSide, num_blocks: int = 3) -> None:
    """R is RECEIVING ``num_blocks`` blocks in one piece, its read is posted."""
    decode.request(R, prefill)
    decode.ticket(prefill.compute(R, decode.now, num_blocks=num_blocks))
    assert decode.count(BlockState.RECEIVING) == num_blocks
