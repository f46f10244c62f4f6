"""What a deployment's next controller must know, in Ray's internal key-value store.

The store lives as long as Ray's control service: no further process is needed that could die as the
controller can. The plan has the deployment's keys, so that it is to end with the deployment. It is
stored under its start's id: who ends one start forgets nothing of another that follows at once.
"""

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ray import cloudpickle
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from core.messages import Party
from deploy.desired import Desired, Target
from deploy.launch import Plan

MAX_STARTS = 6
STARTS_WINDOW_S = 60.0
"""More than ``MAX_STARTS`` starts of a controller in such a time, and it stays down."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """All that a new controller must know."""

    plan: Plan
    desired: Desired
    revisions: Mapping[str, str]
    """Of the services that were started, by name."""


def first_wanted(plan: Plan) -> Wanted:
    """Return what a deployment of ``plan`` starts with."""
    targets: dict[Party, Target] = {
        role: Target(n, plan.revision(role)) for role, n in plan.replicas().items()
    }
    return Wanted(plan, Desired(targets), {})


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a controller begins with; a later life of the same one goes on with what is stored."""

    wanted: Wanted | None
    """None: what is stored already, whose controller has gone for good."""
    start_id: bytes = field(default_factory=lambda: secrets.token_hex(16).encode())
    """Tells this start from those before it."""


class WantedStore:
    """One controller's own access to what is stored. Any thread calls it."""

    def __init__(self, namespace: str, beginning: Beginning, controller_id: str) -> None:
        self._namespace = namespace
        self._controller_id = controller_id
        self._beginning = beginning
        self._lock = threading.Lock()
        """Between ``put`` and ``wipe``: nothing is put after what has been wiped."""
        self._is_wiped = False

    def begin(self) -> Wanted:
        """Store what the controller begins with unless an earlier life of it did; return it.

        By the controller alone, which has its name then: of two starts only one has anything
        stored.

        Raises:
            RuntimeError: the deployment was stopped meanwhile; nothing of it is stored.
        """
        before = start_id(self._namespace)
        is_first = before != self._beginning.start_id
        wanted = self._beginning.wanted if is_first else None
        wanted = wanted or recall(self._namespace)
        if wanted is None:
            raise RuntimeError("nothing is stored any more: its deployment was stopped meanwhile")
        if is_first:
            self.put(wanted)
            self._delete(b"starts")
            self._put(b"start", self._beginning.start_id)
            clear(self._namespace, before)
        # After the storing: a stop that comes later finds what was stored, one before is seen here.
        if self._get(b"stopped") == self._controller_id.encode():
            self.wipe()
            raise RuntimeError("its deployment is being stopped")
        return wanted

    def count_start(self) -> None:
        """Remember one more start; Ray itself would start what crashes at once for ever.

        Raises:
            RuntimeError: there were too many of late. Raised in the constructor of an actor, it is
                what Ray takes for an end for good.
        """
        now = time.time()
        content = self._get(b"starts")
        before: list[float] = [] if content is None else cloudpickle.loads(content)
        starts = [*(start for start in before if now - start < STARTS_WINDOW_S), now]
        if len(starts) > MAX_STARTS:
            raise RuntimeError(
                f"it crashed {MAX_STARTS} times in {now - starts[0]:.0f} s; see its log"
            )
        self._put(b"starts", cloudpickle.dumps(starts))

    def put(self, wanted: Wanted) -> None:
        """Keep ``wanted`` for the next controller; nothing after ``wipe``."""
        with self._lock:
            if not self._is_wiped:
                store(self._namespace, wanted, self._beginning.start_id)

    def wipe(self) -> None:
        """Forget what was stored, for good, though services are still seen to end."""
        with self._lock:
            self._is_wiped = True
            clear(self._namespace, self._beginning.start_id)

    def _get(self, key: bytes) -> bytes | None:
        return _internal_kv_get(key, namespace=self._namespace.encode())

    def _put(self, key: bytes, content: bytes) -> None:
        _internal_kv_put(key, content, namespace=self._namespace.encode())

    def _delete(self, key: bytes) -> None:
        _internal_kv_del(key, namespace=self._namespace.encode())


def start_id(namespace: str) -> bytes:
    """Return the id of the latest start in ``namespace``, though it be stopped by now."""
    return _internal_kv_get(b"start", namespace=namespace.encode()) or b""


def forbid(namespace: str, controller_id: str) -> None:
    """Have a controller that has not begun yet never begin: it is about to be killed."""
    _internal_kv_put(b"stopped", controller_id.encode(), namespace=namespace.encode())


def is_forbidden(namespace: str, controller_id: str) -> bool:
    """Return whether somebody has stopped the deployment of that controller."""
    stopped = _internal_kv_get(b"stopped", namespace=namespace.encode())
    return stopped == controller_id.encode()


def store(namespace: str, wanted: Wanted, start: bytes = b"") -> None:
    """Keep ``wanted`` for the next controller of that ``start``."""
    _internal_kv_put(_key(start), cloudpickle.dumps(wanted), namespace=namespace.encode())


def recall(namespace: str) -> Wanted | None:
    """Return what was stored last; None: nothing, since all has been stopped or never began."""
    content = _internal_kv_get(_key(start_id(namespace)), namespace=namespace.encode())
    return None if content is None else cloudpickle.loads(content)


def is_stored(namespace: str) -> bool:
    """Return whether a deployment was started in ``namespace`` and not stopped."""
    return _internal_kv_get(_key(start_id(namespace)), namespace=namespace.encode()) is not None


def clear(namespace: str, start: bytes) -> None:
    """Forget what was stored of ``start``, and of no other.

    But for its id: a controller that is not dead yet must not begin it again.
    """
    _internal_kv_del(_key(start), namespace=namespace.encode())


def _key(start: bytes) -> bytes:
    return b"wanted:" + start
