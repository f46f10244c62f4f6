"""One forward of the model over a step's plan."""

import ctypes
import logging
from typing import Any, Literal

import torch

from core.errors import InternalError
from core.kv_layout import KVDtype, KVLayout
from engine.attention import PagedAttention
from engine.attention_native import NativeAttention
from engine.attention_reference import ReferenceAttention
from engine.kv_pool import KVPool
from engine.layer_progress import LayerProgress, report_layers
from engine.loading import LoadedModel
from engine.native_layers import LayerRun, replace_head, replace_layers
from engine.native_library import NativeLibrary
from engine.plan import ForwardPlan
from engine.rank_group import LEADER

log = logging.getLogger(__name__)


class PagedModel:
    """A loaded model together with the pool that holds its KV.

    Takes ``loaded`` over: its layers are compiled for this block size, in place.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        block_size: int,
        num_blocks: int,
        kv_dtype: Literal["auto"] | KVDtype = "auto",
        staging_nbytes: int = 0,
    ) -> None:
        self.spec = loaded.spec
        self.device = loaded.device
        self.group = loaded.group
        layout = loaded.spec.kv_layout(block_size, kv_dtype)
        self.kv_pool = KVPool(
            layout, num_blocks, device=loaded.device, staging_nbytes=staging_nbytes
        )
        self._module: Any = loaded.module
        self._library = loaded.library
        if self._library is not None:
            _compile_parts(loaded, self._library, self.kv_pool.layout)
        report_layers(loaded.module, len(loaded.spec.layers))
        # A mask that is four-dimensional is taken as made: transformers then skips making one.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=loaded.device)

    @torch.inference_mode()
    def forward(self, plan: ForwardPlan, progress: LayerProgress | None = None) -> torch.Tensor:
        """Write the step's KV to the pool and return logits [R, vocab] float32 of the sampled rows.

        Rows of ``plan.device_rows`` must have been filled. ``progress`` is told of each layer.
        Ranks that do not sample return no rows.
        """
        is_sampling = self.group is None or self.group.rank == LEADER
        output = self._module(
            input_ids=plan.token_ids[None],
            position_ids=plan.positions[None],
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=plan.sample_rows if is_sampling else plan.sample_rows[:0],
            paged=self._attention(plan),
            layer_progress=progress,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def _attention(self, plan: ForwardPlan) -> PagedAttention:
        if self._library is None:
            return ReferenceAttention(plan, self.kv_pool)
        return NativeAttention(plan, self.kv_pool, self._library)


def _compile_parts(loaded: LoadedModel, library: NativeLibrary, layout: KVLayout) -> None:
    if any(isinstance(part, LayerRun) for part in loaded.module.modules()):
        raise InternalError("a loaded model can be given to one PagedModel only")
    # Compiled layers know no other ranks.
    num_compiled = 0 if loaded.group else replace_layers(loaded.module, library, layout)
    replace_head(loaded.module, library)
    log.info("layers compiled=%d of=%d", num_compiled, len(loaded.spec.layers))
    # The layers that were replaced leave holes in glibc's heap, as large as the weights together.
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
