"""All messages as one type, to and from bytes."""

import msgspec

from core.errors import TransferError
from core.messages.cache import CacheReport, ResetCache, ShowCache
from core.messages.channel import Hello, Ping, Pong, Refused, Welcome
from core.messages.serving import Abort, Failed, Generate, Heartbeat, OutputBatch, Peers
from core.messages.trace import ShowTrace, TraceReport
from core.messages.transfer import (
    Prefill,
    PrefillFailed,
    Reading,
    Released,
    Renew,
    Renewed,
    Ticket,
    Withdraw,
)

AnyMessage = (
    Hello
    | Welcome
    | Refused
    | Ping
    | Pong
    | Peers
    | Generate
    | Abort
    | OutputBatch
    | Failed
    | Heartbeat
    | ResetCache
    | ShowCache
    | CacheReport
    | ShowTrace
    | TraceReport
    | Prefill
    | Ticket
    | Renew
    | Renewed
    | Reading
    | Released
    | Withdraw
    | PrefillFailed
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Return ``message`` as one msgpack object."""
    return _encoder.encode(message)


def decode(payload: bytes | memoryview) -> AnyMessage:
    """Return the message in ``payload``.

    Raises:
        TransferError: not a message of this protocol. The receiver drops it and counts.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        # RecursionError: nested beyond any message, in a field that none of ours has.
        raise TransferError(
            f"peer sent an unreadable message of {len(payload)} bytes: {str(error)[:300]}"
        ) from error
