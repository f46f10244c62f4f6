"""Every error that Sluice raises on purpose, sorted by who acts on it.

    SluiceError
    ├── ConfigError                the operator: start-up stops with this one line
    ├── RequestError               the caller's fault; the router answers 4xx, names field and fix
    │   ├── ModelNotFoundError
    │   └── RequestTooLargeError
    ├── CapacityError              nobody's fault; the same call can succeed later
    │   ├── OutOfBlocksError
    │   └── OverloadedError
    ├── TransferError              the peer or the network; the router may retry elsewhere
    │   ├── PeerLostError
    │   ├── StorageError           the storage tier; what it had is computed instead
    │   └── HandshakeError         incompatible peers; never retried
    └── InternalError              our bug; the worker stops and is restarted
        ├── InvalidTransitionError
        ├── DoubleReleaseError
        ├── StepFailedError
        └── MemoryCorruptionError

Only these cross a package boundary. An adapter turns its library's errors into these and keeps
the original as ``__cause__``.
"""


class SluiceError(Exception):
    """Base of every error that Sluice raises on purpose."""


class ConfigError(SluiceError):
    """A config value, file, model folder or port cannot be used: names it and the fix."""


class RequestError(SluiceError):
    """The request cannot be served as it is: names the field, the value and the fix."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""


class RequestTooLargeError(RequestError):
    """The request's body is larger than the router reads."""


class CapacityError(SluiceError):
    """A limit was reached; the same call can succeed later."""


class OutOfBlocksError(CapacityError):
    """Fewer KV blocks are free than were asked for. Nothing was taken."""

    def __init__(self, *, requested: int, free: int, withheld: int) -> None:
        super().__init__(
            f"asked for {requested} blocks: {free} free, {withheld} fenced or quarantined"
        )
        self.requested = requested
        self.free = free
        self.withheld = withheld


class OverloadedError(CapacityError):
    """No worker can take the request now."""


class TransferError(SluiceError):
    """A peer or the network failed; another peer or attempt may succeed."""


class PeerLostError(TransferError):
    """The peer's process or connection is gone."""


class StorageError(TransferError):
    """The storage of KV blocks failed, or holds something else; the KV is computed instead."""


class HandshakeError(TransferError):
    """The peer cannot be paired with, for the reason in the message. Retrying does not help."""


class InternalError(SluiceError):
    """An invariant of ours broke. The worker that raises it stops."""


class InvalidTransitionError(InternalError):
    """An event cannot happen in the state that it met."""


class DoubleReleaseError(InternalError):
    """A block, step or lease was released twice. The second release changed nothing."""


class StepFailedError(InternalError):
    """A model step raised; its output does not exist."""


class MemoryCorruptionError(InternalError):
    """A poisoned block changed while nobody owned it: a stale writer exists."""
