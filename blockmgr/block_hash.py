"""Names for the content of full blocks: equal hashes mean equal tokens from the very first on."""

import hashlib
from collections.abc import Sequence

import numpy as np

_DIGEST_NBYTES = 16


def hash_blocks(
    token_ids: Sequence[int],
    block_size: int,
    *,
    salt: str,
    fingerprint: str,
    previous: Sequence[bytes] = (),
) -> list[bytes]:
    """Return one hash per full block of ``token_ids``, each over all tokens up to its block's end.

    Args:
        token_ids: The sequence from its first token on.
        block_size: Tokens per block.
        salt: Separates callers that must not share (a tenant, say).
        fingerprint: Of everything else that decides the KV: model, revision, adapter, dtype.
        previous: The hashes of the first blocks, from an earlier call with the same arguments on
            a shorter sequence. They are not computed again.

    Returns:
        ``previous`` and the hashes of the full blocks after it, 16 bytes each.

    Source: block chaining as in vLLM's ``hash_block_tokens``, with a hash that cannot be made to
    collide (BLAKE2b, RFC 7693).
    """
    hashes = list(previous)
    num_blocks = len(token_ids) // block_size
    if len(hashes) >= num_blocks:
        return hashes
    parent = hashes[-1] if hashes else _root(block_size, salt, fingerprint)
    rest = np.asarray(token_ids[len(hashes) * block_size : num_blocks * block_size], dtype="<i8")
    for block in rest.reshape(-1, block_size):
        parent = hashlib.blake2b(parent + block.tobytes(), digest_size=_DIGEST_NBYTES).digest()
        hashes.append(parent)
    return hashes


def _root(block_size: int, salt: str, fingerprint: str) -> bytes:
    """Return the parent of every first block. Lengths keep the fields apart."""
    fields = (str(block_size), salt, fingerprint)
    encoded = [field.encode() for field in fields]
    framed = b"".join(len(field).to_bytes(8, "little") + field for field in encoded)
    return hashlib.blake2b(framed, digest_size=_DIGEST_NBYTES).digest()
