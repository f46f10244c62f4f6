"""What the two sides of the UCX transport say to each other outside of UCX itself.

A source's port is open to whoever reaches it, and UCX aborts on a damaged address of a reader
("Assertion", ``address.c``). So a request is looked at only behind a proof that it was made, as it
is, by somebody who was given the pool's endpoint. What that does not stop:

- A reader that has the endpoint and lies on purpose: it can end the source, as it can ask for any
  byte of the pool. Endpoints are given to admitted decode workers only, encrypted.
- A request that is sent again: its answer goes to the reader that it names, with a tag that nobody
  waits for any more. It lands in no block; UCX holds it until the reader tears that peer down.
- Reading along: requests and answers are in clear, and so are the bytes of the pool.
"""

import hmac
from hashlib import blake2b
from pathlib import Path as FilePath
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from core.errors import TransferError
from transfer.descriptors import Pool
from transfer.memory_owners import MemoryOwner

REQUEST_TAG: Final = 1
"""Of read requests at the source. Answers have the tag that the request names."""
MAX_REQUEST_NBYTES: Final = 16 * 2**20
TOKEN_NBYTES: Final = 32
_PROOF_NBYTES: Final = 32
_DIGEST_NBYTES: Final = 8
_BOOT_ID: Final = FilePath("/proc/sys/kernel/random/boot_id")


class PoolAddress(msgspec.Struct, frozen=True, array_like=True):
    """How to reach a pool: metadata of the ``PoolEndpoint``."""

    ucx_major: int
    host: str
    """Boot id of the source's kernel: only processes under one can share memory."""
    worker: bytes
    key: bytes
    token: bytes
    """Key of the proofs of read requests: who was given the endpoint has it. Never sent in one."""
    owner: MemoryOwner | None = None
    """None: its memory is read by UCX only."""


class ReadRequest(msgspec.Struct, frozen=True, array_like=True):
    """Send these bytes of the pool, in this order, as one message with this tag."""

    tag: int
    reader: bytes
    """Address of the worker that receives the answer."""
    extents: bytes
    """[n, 2] of little-endian uint64: offset in the pool, bytes."""


_request_decoder: Final = msgspec.msgpack.Decoder(ReadRequest)
_address_decoder: Final = msgspec.msgpack.Decoder(PoolAddress)


def encode_address(address: PoolAddress) -> bytes:
    """Return ``address`` behind a digest of itself: UCX takes damaged addresses at their word."""
    body = msgspec.msgpack.encode(address)
    return blake2b(body, digest_size=_DIGEST_NBYTES).digest() + body


def decode_address(metadata: bytes) -> PoolAddress:
    """Return what ``encode_address`` encoded.

    Raises:
        TransferError: it is something else, or is damaged.
    """
    digest, body = metadata[:_DIGEST_NBYTES], metadata[_DIGEST_NBYTES:]
    if blake2b(body, digest_size=_DIGEST_NBYTES).digest() != digest:
        raise TransferError("the endpoint's metadata is damaged, or of another transport")
    try:
        return _address_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise TransferError(f"the endpoint's metadata is malformed: {error}") from error


def encode_request(request: ReadRequest, token: bytes) -> bytes:
    """Return the message: the request behind a proof (HMAC-SHA-256, RFC 2104) by ``token``."""
    body = msgspec.msgpack.encode(request)
    return _proof(body, token) + body


def decode_request(message: bytes, token: bytes) -> ReadRequest | None:
    """Return the request; None: it was not made by a holder of ``token``, or is damaged.

    Nothing of an unproven message is decoded.
    """
    proof, body = message[:_PROOF_NBYTES], message[_PROOF_NBYTES:]
    if not hmac.compare_digest(proof, _proof(body, token)):
        return None
    try:
        return _request_decoder.decode(body)
    except msgspec.MsgspecError:
        return None


def _proof(body: bytes, token: bytes) -> bytes:
    return hmac.digest(token, body, "sha256")


def requested_parts(request: ReadRequest, pool: Pool) -> NDArray[np.uint64] | None:
    """Return [n, 2] of address and bytes; None: something is outside of the pool, or malformed."""
    if len(request.extents) % 16 or not request.extents or not 0 <= request.tag < 2**63:
        return None
    extents = np.frombuffer(request.extents, dtype="<u8").reshape(-1, 2)
    offsets, sizes = extents[:, 0], extents[:, 1]
    total = np.uint64(pool.nbytes)
    if (sizes > total).any() or (offsets > total - sizes).any():
        return None
    return np.ascontiguousarray(
        np.stack([offsets + np.uint64(pool.address), sizes], axis=1), dtype=np.uint64
    )


def boot_id() -> str:
    """Return the id of the running kernel; empty where there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
