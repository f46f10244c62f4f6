"""The tokens of one sequence, packed so that runs of them are compared as bytes."""

import hashlib
import struct
import sys
from collections.abc import Iterable

import numpy as np

_DIGEST_NBYTES = 16
_TOKEN_NBYTES = 4


def namespace_of(*, fingerprint: str, salt: str = "", adapter: str = "") -> bytes:
    """Return the name of the space in which equal tokens mean equal KV, 16 bytes.

    Args:
        fingerprint: Of what decides the KV of all requests: model, revision, dtype.
        salt: Separates callers that must not share (a tenant, say).
        adapter: Of the request's adapter.
    """
    encoded = [field.encode() for field in (fingerprint, salt, adapter)]
    # Lengths keep the fields apart: no salt can be made to look like another fingerprint.
    framed = b"".join(len(field).to_bytes(8, "little") + field for field in encoded)
    return hashlib.blake2b(framed, digest_size=_DIGEST_NBYTES).digest()


class TokenRun:
    """Append-only tokens of one sequence, in the namespace in which they may be shared.

    ``packed`` holds 4 bytes per token. Equal bytes in one namespace mean equal KV, exactly: the
    prefix tree compares tokens and not hashes, so nothing can be made to collide.
    """

    def __init__(self, namespace: bytes, block_size: int, token_ids: Iterable[int] = ()) -> None:
        self.namespace = namespace
        self.block_size = block_size
        self.block_nbytes = block_size * _TOKEN_NBYTES
        """Packed tokens of one block."""
        self.packed = bytearray()
        self._digests: list[bytes] = []
        self.extend(token_ids)

    def __len__(self) -> int:
        """Tokens."""
        return len(self.packed) // _TOKEN_NBYTES

    @property
    def num_blocks(self) -> int:
        """Full blocks."""
        return len(self.packed) // self.block_nbytes

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append ``token_ids``, each in [0, 2**31)."""
        tokens = tuple(token_ids)
        self.packed += struct.pack(f"={len(tokens)}i", *tokens)

    def append(self, token_id: int) -> None:
        """Append one token, in [0, 2**31)."""
        self.packed += token_id.to_bytes(_TOKEN_NBYTES, sys.byteorder)

    def key(self, block: int) -> bytes:
        """Return the packed tokens of full block ``block``."""
        return bytes(memoryview(self.packed)[block * self.block_nbytes :][: self.block_nbytes])

    def slice(self, start: int, stop: int) -> bytearray:
        """Return the packed tokens of the full blocks ``[start, stop)``."""
        return self.packed[start * self.block_nbytes : stop * self.block_nbytes]

    def count_equal(self, start: int, run: bytearray, *, skip: int) -> int:
        """Return how many blocks of ``run``, from its block ``skip`` on, equal ours from ``start``.

        Only leading blocks count, and only our full ones.
        """
        nbytes = self.block_nbytes
        if not skip and self.packed.startswith(run, start * nbytes):
            return len(run) // nbytes
        count = min(len(run) // nbytes - skip, self.num_blocks - start)
        ours = self.packed[start * nbytes : (start + count) * nbytes]
        theirs = run[skip * nbytes : (skip + count) * nbytes]
        if ours == theirs:
            return count
        differs = np.frombuffer(ours, dtype=np.int32) != np.frombuffer(theirs, dtype=np.int32)
        return int(differs.argmax()) // self.block_size

    def digests(self, num_blocks: int) -> list[bytes]:
        """Return names of the first ``num_blocks`` full blocks, each over all tokens up to its end.

        16 bytes each: what a storage tier files a block under. Computed once, when first asked
        for.

        Source: block chaining as in vLLM's ``hash_block_tokens``, with a hash that cannot be made
        to collide (BLAKE2b, RFC 7693).
        """
        size = self.block_size.to_bytes(4, "little")
        for block in range(len(self._digests), num_blocks):
            parent = self._digests[-1] if block else self.namespace + size
            content = parent + self.key(block)
            self._digests.append(hashlib.blake2b(content, digest_size=_DIGEST_NBYTES).digest())
        return self._digests[:num_blocks]
