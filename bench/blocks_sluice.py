"""One request's life in our block manager, with the calls that our schedulers make."""

import gc
from collections.abc import Callable
from time import thread_time

from bench.blocks_task import (
    APPENDED_TOKENS,
    BLOCK_SIZE,
    OUTPUT_TOKEN,
    PROMPT_TOKENS,
    Case,
    Life,
    Order,
    num_filling_requests,
    prompt,
    require_hit,
)
from blockmgr.block_manager import BlockManager
from blockmgr.pool import BlockObserver
from blockmgr.token_run import TokenRun, namespace_of
from core.ids import Attempt, Owner, RequestId
from core.kv_layout import KVGroup, KVLayout

# One group with full attention, as a model without windows has; no KV behind it.
LAYOUT = KVLayout(
    groups=(KVGroup(layers=(0,)),),
    block_size=BLOCK_SIZE,
    num_kv_heads=1,
    head_dim=8,
    dtype="float32",
)
NAMESPACE = namespace_of(fingerprint="bench")


def new_manager(num_blocks: int, *, observers: tuple[BlockObserver, ...] = ()) -> BlockManager:
    """Return a block manager as a decode worker has it."""
    return BlockManager(LAYOUT, num_blocks, fences=True, prefix_caching=True, observers=observers)


def new_owner(serial: int) -> Owner:
    """Return the owner of the request ``serial``."""
    return RequestId(f"request-{serial}"), Attempt(1)


class SluiceSide:
    """Our block manager, brought into the state of one case at a time.

    Args:
        with_steps: Each append is a step: dispatched before the one before it completes, so that
            fences are at work and the release is deferred.
    """

    def __init__(self, *, with_steps: bool = False) -> None:
        self._append = self._append_in_steps if with_steps else self._append_alone
        self._case: Case | None = None
        self._serial = 0

    def carry_out(self, order: Order) -> list[Life]:
        """Return the lives of ``order.repeats`` requests."""
        if self._case != order.case:
            self._prepare(order.case)
        elif not order.case.is_full:
            self._empty(order.case)
        return [self._live(order.case) for _ in range(order.repeats)]

    def _prepare(self, case: Case) -> None:
        if self._case is None or self._case.num_blocks != case.num_blocks:
            self._blocks = new_manager(case.num_blocks)
        self._case = case
        self._empty(case)
        if case.is_full:
            for _ in range(num_filling_requests(case.num_blocks)):
                self._run(*self._next_run(0))
            self._seed(case)
        gc.collect()
        gc.freeze()

    def _empty(self, case: Case) -> None:
        if not self._blocks.reset_cache():
            raise RuntimeError("the pool is in use between two orders")
        self._seed(case)

    def _seed(self, case: Case) -> None:
        """Make the common prefix known, if the case has one."""
        if case.hit_tokens:
            self._run(*self._next_run(case.hit_tokens))

    def _next_run(self, hit_tokens: int) -> tuple[TokenRun, Owner]:
        self._serial += 1
        token_ids = prompt(self._serial, hit_tokens)
        return TokenRun(NAMESPACE, BLOCK_SIZE, token_ids), new_owner(self._serial)

    def _live(self, case: Case) -> Life:
        self._serial += 1
        token_ids, owner = prompt(self._serial, case.hit_tokens), new_owner(self._serial)
        started = thread_time()
        tokens = TokenRun(NAMESPACE, BLOCK_SIZE, token_ids)
        built = thread_time()
        num_cached, seconds = self._run(tokens, owner)
        require_hit(num_cached, case)
        return Life(1e6 * (built - started), *(1e6 * part for part in seconds))

    def _run(self, tokens: TokenRun, owner: Owner) -> tuple[int, tuple[float, float, float]]:
        """Return how many tokens were a hit, and the seconds of the life's parts."""
        blocks = self._blocks
        started = thread_time()
        # The last token is always computed: its logits give the first output token.
        num_cached = blocks.count_cached_tokens(tokens, PROMPT_TOKENS - 1)
        blocks.admit(owner, tokens=tokens, num_cached_tokens=num_cached, num_tokens=PROMPT_TOKENS)
        blocks.settle(owner, PROMPT_TOKENS)
        admitted = thread_time()
        finish = self._append(tokens, owner)
        appended = thread_time()
        blocks.release(owner)
        finish()
        ended = thread_time()
        return num_cached, (admitted - started, appended - admitted, ended - appended)

    def _append_alone(self, tokens: TokenRun, owner: Owner) -> Callable[[], None]:
        blocks = self._blocks
        outputs: list[int] = []
        covered = 0
        for num_tokens in range(PROMPT_TOKENS + 1, PROMPT_TOKENS + APPENDED_TOKENS + 1):
            if num_tokens > covered:
                covered = blocks.grow(owner, num_tokens)
            outputs.append(OUTPUT_TOKEN)
            if num_tokens % BLOCK_SIZE == 0:
                tokens.extend(outputs[-BLOCK_SIZE:])
                blocks.settle(owner, num_tokens)
        return _nothing

    def _append_in_steps(self, tokens: TokenRun, owner: Owner) -> Callable[[], None]:
        blocks, step = self._blocks, None
        outputs: list[int] = []
        covered = 0
        for num_tokens in range(PROMPT_TOKENS + 1, PROMPT_TOKENS + APPENDED_TOKENS + 1):
            if num_tokens > covered:
                covered = blocks.grow(owner, num_tokens)
            dispatched = blocks.dispatch_step((owner,))
            if step is not None:
                blocks.complete_step(step)
                outputs.append(OUTPUT_TOKEN)
                if (num_tokens - 1) % BLOCK_SIZE == 0:
                    tokens.extend(outputs[-BLOCK_SIZE:])
                    blocks.settle(owner, num_tokens - 1)
            step = dispatched
        last = step
        assert last is not None
        return lambda: blocks.complete_step(last)


def _nothing() -> None:
    """Nothing is in flight at the end of a life without steps."""
