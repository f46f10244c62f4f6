"""Loads any decoder model of ``transformers`` from a folder, straight into its dtype."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from core.config import HeadWindowConfig
from core.errors import ConfigError
from core.kv_heads import with_head_window
from engine.attention import ATTENTION_NAME, register
from engine.kv_rows import TORCH_DTYPES
from engine.model_spec import ModelSpec, model_fingerprint, tokenizer_fingerprint
from engine.native_library import NativeLibrary, open_native_library
from engine.probing import probe_layers
from engine.rank_group import RankGroup, RankPlace
from engine.tensor_parallel import take_part
from engine.threads import use_threads

log = logging.getLogger(__name__)

AttentionChoice = Literal["auto", "reference", "native"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights on their device, and the facts that the rest of a worker needs."""

    module: PreTrainedModel
    spec: ModelSpec
    device: torch.device
    library: NativeLibrary | None
    """Compiled kernels; None: attention is plain torch."""
    num_kv_heads: int
    """Of one layer of the whole model; ``spec`` has those that are here."""
    group: RankGroup | None = None
    """The ranks that have the other parts of the model; None: it is whole."""


def load_model(
    path: Path,
    *,
    dtype: Literal["float32", "bfloat16"],
    device: Literal["auto", "cpu", "cuda"] = "auto",
    attention: AttentionChoice = "auto",
    num_threads: int = 0,
    max_model_len: int | None = None,
    head_window: HeadWindowConfig | None = None,
    place: RankPlace | None = None,
) -> LoadedModel:
    """Return the model in the folder ``path``, which holds a config, safetensors and a tokenizer.

    ``num_threads`` is for all CPU work of this process; 0 takes one per core. ``head_window``
    changes what the model computes. With ``place`` this process gets that part of the model, and
    waits for those that load the others.

    Raises:
        ConfigError: the folder or a file in it is missing or damaged, or the model is of a kind
            that cannot be served; names the file and the fix.
    """
    register()
    chosen = _device(device)
    if place is not None:
        place.check_device(chosen)
    num_threads = use_threads(num_threads)
    library = _library(attention, chosen, num_threads=num_threads)
    config = _read_config(path)
    module = _read_weights(path, config, dtype=dtype).eval()
    if place is None:
        module.to(chosen)  # else a part of it, later: the whole may be more than one device holds
    text_config = module.config.get_text_config()
    probed = probe_layers(module, text_config, name=str(path))
    num_kv_heads, group = probed[0].num_kv_heads, None
    if place is not None:
        probed, group = take_part(module, probed, place, device=chosen, name=str(path))
    layers = with_head_window(probed, head_window)
    spec = ModelSpec(
        vocab_size=text_config.vocab_size,
        eos_token_ids=_eos_token_ids(path, text_config),
        max_model_len=_max_model_len(text_config, wanted=max_model_len, name=str(path)),
        layers=layers,
        dtype=dtype,
        fingerprint=model_fingerprint(path),
        tokenizer_fingerprint=tokenizer_fingerprint(path),
    )
    log.info(
        "model loaded path=%s type=%s layers=%d dtype=%s device=%s max_model_len=%d",
        path,
        text_config.model_type,
        len(layers),
        dtype,
        chosen,
        spec.max_model_len,
    )
    return LoadedModel(
        module=module,
        spec=spec,
        device=chosen,
        library=library,
        num_kv_heads=num_kv_heads,
        group=group,
    )


def _device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("model.device=cuda: torch finds no CUDA device; use 'auto' or 'cpu'")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def _library(
    attention: AttentionChoice, device: torch.device, *, num_threads: int
) -> NativeLibrary | None:
    if attention == "reference":
        return None
    if device.type != "cpu":
        if attention == "native":
            raise ConfigError("engine.attention=native runs on CPU only; use 'auto'")
        return None
    try:
        return open_native_library(num_threads=num_threads)
    except ConfigError as error:
        if attention == "native":
            raise
        log.warning("native kernels unavailable, attention is plain torch reason=%s", error)
        return None


def _read_config(path: Path) -> Any:  # noqa: ANN401  # each family has its own class
    if not path.is_dir():
        raise ConfigError(f"model.model={path}: no such folder; give a folder with config.json")
    if not (path / "config.json").is_file():
        raise ConfigError(f"model folder {path}: config.json is missing; is it a model's folder?")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"model folder {path}: no *.safetensors file; convert the weights to safetensors"
        )
    try:
        json.loads((path / "config.json").read_text(encoding="utf-8"))
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"model folder {path}: config.json cannot be used: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"model folder {path}: {config.model_type!r} is an encoder-decoder model; "
            "use a decoder-only model"
        )
    return config


def _read_weights(path: Path, config: Any, *, dtype: str) -> PreTrainedModel:  # noqa: ANN401
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # safetensors raises its own type, transformers nearly any
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"model folder {path}: the weights cannot be loaded as a decoder model: "
            f"{reason[0] if reason else type(error).__name__}"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"model folder {path}: the safetensors lack {len(missing)} tensors of the model, "
            f"{missing[0]} for one; download it again"
        )
    return module


def _eos_token_ids(path: Path, config: Any) -> tuple[int, ...]:  # noqa: ANN401
    eos: int | list[int] | None = config.eos_token_id
    if (path / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(path, local_files_only=True)
        eos = generation.eos_token_id if generation.eos_token_id is not None else eos
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def _max_model_len(config: Any, *, wanted: int | None, name: str) -> int:  # noqa: ANN401
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        # Past the trained length these scale by the longest sequence of the batch, so one
        # request's text would depend on its neighbours.
        trained = rope.get("original_max_position_embeddings")
        limit = min(value for value in (trained, limit) if value is not None)
    if limit is None:
        if wanted is None:
            raise ConfigError(f"model {name}: its config states no length; set model.max_model_len")
        return wanted
    if wanted is not None and wanted > limit:
        raise ConfigError(f"model.max_model_len={wanted}: {name} allows at most {limit}")
    return wanted or limit
