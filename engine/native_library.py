"""The compiled CPU kernels: built once per machine with the system's compiler, called by ctypes.

ctypes releases the GIL for the time of a call. The structures mirror ``native/step.h`` and
``native/gemm.h`` field by field.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from core.errors import ConfigError

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-pthread")
COMPILE_TIMEOUT_S = 300
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
KV_AS_COMPUTED, KV_FLOAT8_E4M3 = 0, 1
_ON_LAYER = ctypes.CFUNCTYPE(None, c_int32)


class Matrix(Structure):
    """See ``native/gemm.h``."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("columns", c_int),
        ("inner", c_int),
    )


class Group(Structure):
    """See ``native/step.h``, as for all below."""

    _fields_ = (("slots", c_void_p), ("blocks", c_void_p), ("table_width", c_int64))


class Step(Structure):
    """The batch of one forward."""

    _fields_ = (
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("query_starts", c_void_p),
        ("kv_lens", c_void_p),
        ("groups", POINTER(Group)),
        ("pool", c_void_p),
        ("block_nbytes", c_int64),
        ("block_size", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("kv_type", c_int64),
    )


class KVHead(Structure):
    """One KV head of one layer."""

    _fields_ = (
        ("group", c_int64),
        ("key_offset", c_int64),
        ("value_offset", c_int64),
        ("window", c_int64),
        ("first_tokens", c_int64),
    )


class Attention(Structure):
    """The attention of one layer."""

    _fields_ = (
        ("places", POINTER(KVHead)),
        ("token_nbytes", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("sinks", c_void_p),
        ("scaling", c_float),
        ("softcap", c_float),
    )


class Norm(Structure):
    """A root-mean-square norm, or none."""

    _fields_ = (("weight", c_void_p), ("epsilon", c_float))


class Layer(Structure):
    """One decoder layer."""

    _fields_ = (
        ("attention", Attention),
        ("before_attention", Norm),
        ("after_attention", Norm),
        ("before_mlp", Norm),
        ("after_mlp", Norm),
        ("query", Norm),
        ("key", Norm),
        ("rotary_dim", c_int64),
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("activation", c_int64),
    )


class NativeLibrary:
    """The kernels with a team of ``num_threads`` threads, which block while there is no call."""

    def __init__(self, path: Path, *, num_threads: int) -> None:
        library = ctypes.CDLL(str(path))
        library.sluice_open.restype = c_void_p
        library.sluice_open.argtypes = (c_int,)
        library.sluice_close.argtypes = (c_void_p,)
        library.sluice_pack.argtypes = (c_void_p, c_int, POINTER(c_int32), c_int, c_void_p)
        library.sluice_run_layers.argtypes = (
            c_void_p, c_int, POINTER(Layer), c_int, POINTER(Step), c_void_p,
            c_int, POINTER(c_int32), _ON_LAYER,
        )  # fmt: skip
        library.sluice_attend.argtypes = (
            c_void_p, c_int, POINTER(Attention), POINTER(Step),
            c_void_p, c_void_p, c_void_p, c_void_p,
        )  # fmt: skip
        library.sluice_linear.argtypes = (
            c_void_p, c_int, POINTER(Matrix), c_void_p, c_int64, c_void_p,
        )  # fmt: skip
        self._library = library
        self._engine = library.sluice_open(num_threads)
        weakref.finalize(self, library.sluice_close, self._engine)

    def run_layers(
        self,
        layers: "ctypes.Array[Layer]",
        step: Step,
        x: torch.Tensor,
        *,
        marks: Sequence[int] = (),
        reached: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Put ``x`` [tokens, hidden], contiguous, through the layers in place.

        ``reached`` is told of each of ``marks``, indices of ``layers`` ascending, when that layer
        is complete and later ones are not. It must not raise.
        """
        self._library.sluice_run_layers(
            self._engine, DTYPE_CODES[x.dtype], layers, len(layers), step, x.data_ptr(),
            len(marks), (c_int32 * len(marks))(*marks), _ON_LAYER(reached),
        )  # fmt: skip

    def attend(
        self,
        attention: Attention,
        step: Step,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Write the keys and values to their slots; return attention, shaped as ``query``."""
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        output = torch.empty_like(query)
        self._library.sluice_attend(
            self._engine, DTYPE_CODES[query.dtype], attention, step,
            query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr(),
        )  # fmt: skip
        return output

    def linear(self, x: torch.Tensor, matrix: "PackedMatrix") -> torch.Tensor:
        """Return ``x`` [rows, inner] times the matrix: [rows, columns] float32."""
        x = x.contiguous()
        output = torch.empty(x.shape[0], matrix.structure.columns, dtype=torch.float32)
        self._library.sluice_linear(
            self._engine, DTYPE_CODES[x.dtype], matrix.structure,
            x.data_ptr(), x.shape[0], output.data_ptr(),
        )  # fmt: skip
        return output

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, order: torch.Tensor | None = None
    ) -> "PackedMatrix":
        """Return ``weight`` [columns, inner] packed, its rows taken in ``order`` int32."""
        return PackedMatrix(self._library, weight, bias, order)


class PackedMatrix:
    """Owns the memory that its ``structure`` points to."""

    PANEL = 32

    def __init__(
        self,
        library: Any,  # noqa: ANN401  # functions of a CDLL are made at run time
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        order: torch.Tensor | None,
    ) -> None:
        columns, inner = weight.shape
        weight = weight.detach().contiguous()
        if order is None:
            order = torch.arange(columns, dtype=torch.int32)
        padded = -(-columns // self.PANEL) * self.PANEL
        self._packed = torch.empty(padded * inner, dtype=weight.dtype)
        self._bias = None if bias is None else bias.detach().float()[order.long()].contiguous()
        library.sluice_pack(
            weight.data_ptr(),
            inner * weight.element_size() // 4,
            ctypes.cast(order.data_ptr(), POINTER(c_int32)),
            columns,
            self._packed.data_ptr(),
        )
        self.structure = Matrix(
            packed=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            columns=columns,
            inner=inner,
        )


def fits(inner: int, dtype: torch.dtype) -> bool:
    """Return whether rows of ``inner`` elements are whole 32-bit words."""
    return dtype in DTYPE_CODES and inner * dtype.itemsize % 4 == 0


def open_native_library(*, num_threads: int, cache: Path | None = None) -> NativeLibrary:
    """Return the kernels, compiled now where this machine has not yet done so.

    Raises:
        ConfigError: there is no compiler, or it fails; names it and the fix.
    """
    folder = cache or Path.home() / ".cache" / "sluice" / "native"
    path = folder / f"sluice-{_build_key()}.so"
    if not path.is_file():
        _compile(path)
    return NativeLibrary(path, num_threads=num_threads)


def _build_key() -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    digest.update(_cpu_identity().encode())
    return digest.hexdigest()[:16]


def _cpu_identity() -> str:
    """Return what ``-march=native`` depends on: a cache folder may be shared by machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return platform.machine() + platform.processor()
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(path: Path) -> None:
    compilers: Sequence[str] = (os.environ["CXX"],) if "CXX" in os.environ else COMPILERS
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    if compiler is None:
        raise ConfigError(
            f"engine.attention: no C++ compiler ({', '.join(compilers)}) on this machine; "
            "install g++, or set engine.attention=reference"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        staging = Path(folder) / path.name
        command = [compiler, *FLAGS, "-o", str(staging), str(SOURCES / "sluice_native.cpp")]
        try:
            done = subprocess.run(  # noqa: S603  # our own sources, the operator's compiler
                command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"engine.attention: {compiler} did not run: {error}") from error
        if done.returncode != 0:
            first = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise ConfigError(
                f"engine.attention: {compiler} cannot compile the kernels: {first}; "
                "use GCC 11 or newer, or set engine.attention=reference"
            )
        staging.replace(path)
    log.info("native kernels compiled path=%s compiler=%s", path, compiler)
