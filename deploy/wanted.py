"""What a deployment's next controller must know, in Ray's internal key-value store.

The store lives as long as Ray's control service: no further process is needed that could die as the
controller can. The plan has the deployment's keys, so that it is to end with the deployment.
"""

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ray import cloudpickle
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from deploy.launch import Plan
from deploy.reconciler import Desired, Target

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
    targets = {role: Target(n, plan.revision(role)) for role, n in plan.replicas().items()}
    return Wanted(plan, Desired(targets), {})


@dataclass(frozen=True, slots=True)
class First:
    """What the controller of a new deployment begins with; one of a later life goes on instead."""

    wanted: Wanted
    start_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    """Tells this start from those before it."""


class WantedStore:
    """The controller's own access to what is stored. Any thread calls it."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._lock = threading.Lock()
        """Between ``put`` and ``wipe``: nothing is put after what has been wiped."""
        self._is_wiped = False

    def begin(self, first: First) -> None:
        """Store ``first`` unless an earlier life of the controller did.

        By the controller alone, which has its name then: of two starts only one has anything
        stored.
        """
        if self._get(b"start") != first.start_id:
            self.put(first.wanted)
            forgive(self._namespace)
            self._put(b"start", first.start_id)

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
                store(self._namespace, wanted)

    def wipe(self) -> None:
        """Forget what was stored, for good, though services are still seen to end."""
        with self._lock:
            self._is_wiped = True
            clear(self._namespace)

    def _get(self, key: bytes) -> bytes | None:
        return _internal_kv_get(key, namespace=self._namespace.encode())

    def _put(self, key: bytes, content: bytes) -> None:
        _internal_kv_put(key, content, namespace=self._namespace.encode())


def store(namespace: str, wanted: Wanted) -> None:
    """Keep ``wanted`` for the next controller."""
    _internal_kv_put(b"wanted", cloudpickle.dumps(wanted), namespace=namespace.encode())


def recall(namespace: str) -> Wanted | None:
    """Return what was stored last; None: nothing, since all has been stopped or never began."""
    content = _internal_kv_get(b"wanted", namespace=namespace.encode())
    return None if content is None else cloudpickle.loads(content)


def is_stored(namespace: str) -> bool:
    """Return whether a deployment was started in ``namespace`` and not stopped."""
    return _internal_kv_get(b"wanted", namespace=namespace.encode()) is not None


def clear(namespace: str) -> None:
    """Forget what was stored.

    But for which start it was: a controller that is not dead yet must not begin it again.
    """
    _internal_kv_del(b"wanted", namespace=namespace.encode())


def forgive(namespace: str) -> None:
    """Forget how often the controller started lately."""
    _internal_kv_del(b"starts", namespace=namespace.encode())
