"""The stored form of one block: a header that proves what the payload is, then the payload.

    8 magic "SLUICEKV" | 2 version | 2 group | 4 crc32 of the payload | 8 nbytes | 16 digest |
    16 fingerprint | payload

Little-endian. The checksum finds what disks, networks and cut-off writes do to bytes; who may
write to the storage may forge it, and is trusted as the model's own folder is.
"""

import re
import struct
import zlib
from typing import Final

from core.errors import StorageError
from core.tiers import BlockName

_HEADER: Final = struct.Struct("<8sHHIQ16s16s")
_MAGIC: Final = b"SLUICEKV"
_BLOCK_PATH: Final = re.compile(r"(?:.*/)?[0-9a-f]+/([0-9a-f]{2})/\1[0-9a-f]+-[0-9]+")
_VERSION: Final = 1
FINGERPRINT_NBYTES: Final = 16


def pack(name: BlockName, payload: memoryview, *, fingerprint: bytes) -> bytes:
    """Return the stored form of ``payload``; a copy.

    Args:
        name: Of the content.
        payload: The block's bytes.
        fingerprint: Of all that decides what the bytes mean: model, layout, dtype.
    """
    return b"".join((_header(name, payload, fingerprint), payload))


def unpack(stored: memoryview, name: BlockName, target: memoryview, *, fingerprint: bytes) -> None:
    """Verify ``stored`` and copy its payload into ``target``.

    Raises:
        StorageError: it is not the stored form of ``name`` for this layout, is cut off, or was
            changed. ``target`` was not touched.
    """
    payload = stored[_HEADER.size :]
    if payload.nbytes != target.nbytes:
        raise StorageError(f"block {_text(name)}: {payload.nbytes} bytes, not {target.nbytes}")
    if bytes(stored[: _HEADER.size]) != _header(name, payload, fingerprint):
        raise StorageError(f"block {_text(name)}: its header and its bytes do not match")
    target[:] = payload


def path_of(name: BlockName, *, fingerprint: bytes) -> str:
    """Return the place of a block, the same for every worker of one model and layout."""
    digest = name.digest.hex()
    return f"{fingerprint.hex()}/{digest[:2]}/{digest}-{name.group}"


def is_block(path: str) -> bool:
    """Return whether ``path`` may be of ``path_of``: what else there is must not be deleted."""
    return _BLOCK_PATH.fullmatch(path) is not None


def _header(name: BlockName, payload: memoryview, fingerprint: bytes) -> bytes:
    return _HEADER.pack(
        _MAGIC,
        _VERSION,
        name.group,
        zlib.crc32(payload),
        payload.nbytes,
        name.digest,
        fingerprint,
    )


def _text(name: BlockName) -> str:
    return f"{name.digest.hex()}-{name.group}"
