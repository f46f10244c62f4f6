"""Which way the bytes of a peer's pool take, from the lanes that UCX chose."""

from collections.abc import Sequence
from typing import Final

from transfer.transport import MemoryKind, Path, PathKind

_COPIES_OF_HOST_MEMORY: Final = ("cma", "xpmem", "knem")
_COPIES_OF_DEVICE_MEMORY: Final = ("cuda_ipc",)
_RDMA: Final = ("rc_", "dc_", "srd", "gga_")

Lanes = Sequence[tuple[str, str]]


def path_of(lanes: Lanes, memory: MemoryKind, *, is_by_message: bool = False) -> Path:
    """Return the path that ``lanes`` make, and what carries the bytes.

    The kinds other than ``tcp`` are one-sided: the source takes no part in a read. Whatever is read
    by message is called ``tcp``.
    """
    kinds: tuple[tuple[PathKind, tuple[str, ...]], ...] = (
        ("shared_memory", _COPIES_OF_HOST_MEMORY if memory == "host" else ()),
        ("cuda_ipc", _COPIES_OF_DEVICE_MEMORY if memory == "cuda" else ()),
        ("rdma", _RDMA),
    )
    for kind, prefixes in () if is_by_message else kinds:
        chosen = [lane for lane in lanes if prefixes and lane[0].startswith(prefixes)]
        if chosen:
            return Path(kind, _words(chosen))
    return Path("tcp", f"{_words(lanes)} by message")


def _words(lanes: Lanes) -> str:
    return " ".join(f"{transport}/{device}" for transport, device in lanes)
