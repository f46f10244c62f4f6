"""Messages between router and workers, and between decode and prefill workers.

One msgpack object each, tagged with its type. Every message about a request names the request and
its attempt; every message about KV names the incarnation that it was made by or is meant for. A
receiver counts and drops what names an older attempt or incarnation.

    router  ──Peers, Generate, Abort───────────────────▶ decode
    router  ◀─OutputBatch, Failed─────────────────────── decode
    router  ◀─Heartbeat, CacheReport, TraceReport─── prefill, decode
    router  ──ResetCache, ShowCache, ShowTrace─────▶ prefill, decode
    decode  ──Prefill, Renew, Reading, Released, Withdraw──▶ prefill
    decode  ◀─Ticket, Renewed, PrefillFailed──────────────── prefill
    client  ──Hello, Ping──▶ server ──Welcome or Refused, Pong──▶ client      (every channel)
"""

from core.messages.base import PROTOCOL_VERSION, Message, Party, Role
from core.messages.cache import CacheReport, CacheState, ResetCache, ShowCache, TierUse
from core.messages.channel import Compatibility, Hello, Ping, Pong, PoolEndpoint, Refused, Welcome
from core.messages.serving import (
    Abort,
    DesiredWorkers,
    Failed,
    FinishReason,
    Generate,
    Heartbeat,
    Output,
    OutputBatch,
    Peers,
    PrefillPeer,
    RequestStats,
    WorkerLoad,
)
from core.messages.trace import ShowTrace, TraceReport
from core.messages.transfer import (
    FirstToken,
    GroupBlocks,
    PieceId,
    Prefill,
    PrefillFailed,
    Reading,
    Released,
    Renew,
    Renewed,
    Ticket,
    Withdraw,
)
from core.messages.wire import AnyMessage, decode, encode

__all__ = [
    "PROTOCOL_VERSION",
    "Abort",
    "AnyMessage",
    "CacheReport",
    "CacheState",
    "Compatibility",
    "DesiredWorkers",
    "Failed",
    "FinishReason",
    "FirstToken",
    "Generate",
    "GroupBlocks",
    "Heartbeat",
    "Hello",
    "Message",
    "Output",
    "OutputBatch",
    "Party",
    "Peers",
    "PieceId",
    "Ping",
    "Pong",
    "PoolEndpoint",
    "Prefill",
    "PrefillFailed",
    "PrefillPeer",
    "Reading",
    "Refused",
    "Released",
    "Renew",
    "Renewed",
    "RequestStats",
    "ResetCache",
    "Role",
    "ShowCache",
    "ShowTrace",
    "Ticket",
    "TierUse",
    "TraceReport",
    "Welcome",
    "Withdraw",
    "WorkerLoad",
    "decode",
    "encode",
]
