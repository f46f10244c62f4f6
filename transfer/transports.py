"""The implementations of ``Transport``, by the name that a configuration gives."""

import logging
from collections.abc import Callable, Mapping
from typing import Final, Literal

from core.errors import ConfigError
from core.ids import Incarnation
from transfer.nixl_transport import NixlTransport
from transfer.transport import Transport
from transfer.ucx_transport import UcxTransport
from transfer.ucxx_transport import UcxxTransport

log = logging.getLogger(__name__)

TransportName = Literal["auto", "ucx", "nixl", "ucxx"]

_NO_OPTIONS: Final[Mapping[str, str]] = {}


def _open_ucx(incarnation: Incarnation, options: Mapping[str, str]) -> Transport:
    return UcxTransport(incarnation, ucx_options=options)


def _open_nixl(incarnation: Incarnation, options: Mapping[str, str]) -> Transport:
    return NixlTransport(incarnation, ucx_options=options)


def _open_ucxx(incarnation: Incarnation, options: Mapping[str, str]) -> Transport:
    return UcxxTransport(incarnation, ucx_options=options)


_OPENERS: Final[Mapping[str, Callable[[Incarnation, Mapping[str, str]], Transport]]] = {
    "ucx": _open_ucx,
    "nixl": _open_nixl,
    "ucxx": _open_ucxx,
}
"""Best first: ``docs/decisions/0012-which-ucx-binding.md``."""


def open_transport(
    name: str, incarnation: Incarnation, *, ucx_options: Mapping[str, str] = _NO_OPTIONS
) -> Transport:
    """Return a new transport.

    Args:
        name: A ``TransportName``; ``auto`` takes the best that loads here.
        incarnation: Of this process.
        ucx_options: UCX settings without their ``UCX_`` prefix.

    Raises:
        ConfigError: the name is unknown, or what it names does not load here.
    """
    if name != "auto":
        opener = _OPENERS.get(name)
        if opener is None:
            known = ", ".join(("auto", *_OPENERS))
            raise ConfigError(f"transfer.transport={name!r} is unknown; use one of: {known}")
        return opener(incarnation, ucx_options)
    reasons: list[str] = []
    for candidate, opener in _OPENERS.items():
        try:
            transport = opener(incarnation, ucx_options)
        except ConfigError as error:
            reasons.append(str(error))
            continue
        log.info(
            "event=transport_chosen transport=%s chosen=auto not_loaded=%s",
            candidate,
            reasons or None,
        )
        return transport
    raise ConfigError(f"no transport loads here: {'; '.join(reasons)}")
