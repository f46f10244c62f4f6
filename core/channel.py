"""Authenticated message channels between router and workers: zmq, CURVE, msgpack.

A client says Hello and is answered Welcome or Refused; then both sides send messages, and both
learn within ``silence_s`` that the other is gone. A channel never reconnects: after a loss the
owner opens a new one, whose Welcome carries the incarnation that it now talks to. Messages may be
lost with their peer; they are never reordered or duplicated.

Source: CURVE per https://rfc.zeromq.org/spec/26/, ZAP allow-list per https://rfc.zeromq.org/spec/27/.
"""

from core.channel_keys import ChannelKeys, DeploymentKeys
from core.client_channel import ClientChannel
from core.server_channel import ClientId, ClientLost, ServerChannel

__all__ = [
    "ChannelKeys",
    "ClientChannel",
    "ClientId",
    "ClientLost",
    "DeploymentKeys",
    "ServerChannel",
]
