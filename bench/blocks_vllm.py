"""One request's life in vLLM's ``KVCacheManager``, in a process of vLLM's own environment.

Run by ``bench.blocks``: reads orders as JSON, one a line, and answers each with one line. It waits
without a CPU while the other side is measured. The calls are those of vLLM's scheduler: lookup and
allocation when a request is admitted, one token and one slot per step, and the release.
"""

import gc
import sys
from time import thread_time

import msgspec
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from bench.blocks_task import (
    APPENDED_TOKENS,
    BLOCK_SIZE,
    OUTPUT_TOKEN,
    PROMPT_TOKENS,
    Case,
    Life,
    Lives,
    Order,
    num_filling_requests,
    prompt,
    require_hit,
)

_SAMPLING = SamplingParams(max_tokens=APPENDED_TOKENS)


def _manager(num_blocks: int) -> KVCacheManager:
    # One group with full attention, as a model without windows has; no KV behind it.
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    groups = [KVCacheGroupSpec(["layer"], spec)]
    # vLLM keeps one block of the pool for itself, the null block.
    config = KVCacheConfig(num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config,
        max_model_len=2 * PROMPT_TOKENS,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=True,
    )


class VllmSide:
    """vLLM's block manager, brought into the state of one case at a time."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._case: Case | None = None
        self._serial = 0

    def carry_out(self, order: Order) -> Lives:
        """Return the lives of ``order.repeats`` requests."""
        if self._case != order.case:
            self._prepare(order.case)
        elif not order.case.is_full:
            self._empty(order.case)
        return Lives([self._live(order.case) for _ in range(order.repeats)])

    def _prepare(self, case: Case) -> None:
        if self._case is None or self._case.num_blocks != case.num_blocks:
            self._blocks = _manager(case.num_blocks)
        self._case = case
        self._empty(case)
        if case.is_full:
            for _ in range(num_filling_requests(case.num_blocks)):
                self._run(self._request(0))
            self._seed(case)
        # As vLLM's engine does once it is up; a collection would visit every block of the pool.
        gc.collect()
        gc.freeze()

    def _empty(self, case: Case) -> None:
        if not self._blocks.reset_prefix_cache():
            raise RuntimeError("vLLM's pool is in use between two orders")
        self._seed(case)

    def _seed(self, case: Case) -> None:
        """Make the common prefix known, if the case has one."""
        if case.hit_tokens:
            self._run(self._request(case.hit_tokens))

    def _live(self, case: Case) -> Life:
        token_ids, name = self._next_prompt(case.hit_tokens)
        started = thread_time()
        request = self._make(token_ids, name)
        built = thread_time()
        num_cached, seconds = self._run(request)
        require_hit(num_cached, case)
        return Life(1e6 * (built - started), *(1e6 * part for part in seconds))

    def _next_prompt(self, hit_tokens: int) -> tuple[list[int], str]:
        self._serial += 1
        return prompt(self._serial, hit_tokens), f"request-{self._serial}"

    def _request(self, hit_tokens: int) -> Request:
        return self._make(*self._next_prompt(hit_tokens))

    def _make(self, token_ids: list[int], name: str) -> Request:
        return Request(
            request_id=name,
            prompt_token_ids=token_ids,
            sampling_params=_SAMPLING,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def _run(self, request: Request) -> tuple[int, tuple[float, float, float]]:
        """Return how many tokens of ``request`` were a hit, and the seconds of its parts."""
        blocks = self._blocks
        started = thread_time()
        hit, num_cached, *_ = blocks.get_computed_blocks(request)
        if blocks.allocate_slots(request, PROMPT_TOKENS - num_cached, num_cached, hit) is None:
            raise RuntimeError("vLLM's pool has too few blocks for one request")
        request.num_computed_tokens = PROMPT_TOKENS
        admitted = thread_time()
        for _ in range(APPENDED_TOKENS):
            request.append_output_token_ids(OUTPUT_TOKEN)
            blocks.allocate_slots(request, 1)
            request.num_computed_tokens += 1
        appended = thread_time()
        blocks.free(request)
        ended = thread_time()
        return num_cached, (admitted - started, appended - admitted, ended - appended)


def main() -> None:
    """Answer orders until there are no more."""
    answers, sys.stdout = sys.stdout, sys.stderr
    side = VllmSide()
    for line in sys.stdin:
        lives = side.carry_out(msgspec.json.decode(line, type=Order))
        print(msgspec.json.encode(lives).decode(), file=answers, flush=True)


if __name__ == "__main__":
    main()
