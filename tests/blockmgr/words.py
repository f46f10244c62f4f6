"""Short words for what the tests of the block manager do."""

from collections.abc import Iterable, Sequence

from blockmgr.block_manager import BlockManager
from blockmgr.receive_target import ReceiveTarget
from blockmgr.states import BlockState
from blockmgr.token_run import TokenRun, namespace_of
from core.ids import Attempt, BlockId, OperationId, Owner, RequestId
from core.kv_layout import KVGroup, KVLayout


def layout_of(*groups: KVGroup, block_size: int = 16) -> KVLayout:
    return KVLayout(
        groups=groups or (KVGroup(layers=(0,)),),
        block_size=block_size,
        num_kv_heads=1,
        head_dim=8,
        dtype="float32",
    )


def owner_of(name: str, attempt: int = 1) -> Owner:
    return RequestId(name), Attempt(attempt)


def run_of(tokens: Iterable[int], block_size: int = 16, *, salt: str = "") -> TokenRun:
    return TokenRun(namespace_of(fingerprint="model", salt=salt), block_size, tokens)


def admit_new(
    blocks: BlockManager, name: str, num_tokens: int, *, tokens: Iterable[int] | None = None
) -> Owner:
    """Admit an owner without a hit; ``tokens`` are what it can share once they have settled."""
    owner = owner_of(name)
    run = None if tokens is None else run_of(tokens)
    blocks.admit(owner, tokens=run, num_cached_tokens=0, num_tokens=num_tokens)
    return owner


def admit_with_hit(blocks: BlockManager, name: str, tokens: Sequence[int]) -> int:
    """Admit an owner with the longest hit; return the hit."""
    run = run_of(tokens)
    cached = blocks.count_cached_tokens(run)
    blocks.admit(owner_of(name), tokens=run, num_cached_tokens=cached, num_tokens=len(tokens))
    return cached


def ids_of(blocks: BlockManager, owner: Owner, group: int = 0) -> list[BlockId]:
    """Return the owner's blocks in one group, without holes."""
    return [BlockId(at) for at in blocks.block_tables(owner)[group].tolist() if at >= 0]


def num_free(blocks: BlockManager) -> int:
    return blocks.counts()[BlockState.FREE]


def take_one(blocks: BlockManager, name: str) -> BlockId:
    """Allocate a single block for a new owner."""
    owner = admit_new(blocks, name, 0)
    operation = OperationId(1_000_000 + len(blocks.owners))
    (((block_id, _),),) = blocks.begin_receive(owner, [ReceiveTarget(0, 0, 1)], operation)
    blocks.end_operation(operation)
    return block_id
