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
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_put,
    internal_kv_get_gcs_client,
)

from core.messages import Party
from deploy.supervision.desired import Desired, Target
from deploy.supervision.launch import Plan

MAX_STARTS = 6
STARTS_WINDOW_S = 60.0
"""More than ``MAX_STARTS`` starts of a controller in such a time, and it stays down."""
PUT_TIMEOUT_S = 60.0
"""For Ray's control service to take what a running controller stores: as long as Ray gives other
calls. Without a bound such a call outlives a control service that is stopped, for ever."""
LATEST_START = b"start"
"""Key of the id of the latest start."""
START_TIMES = b"starts"
"""Key of when the latest start's controller began its lives, by ``time.time``."""
STOPPED_CONTROLLER = b"stopped"
"""Key of the id of the controller that was told to stop last."""


class StoppedMeanwhileError(RuntimeError):
    """The deployment was stopped before its controller had begun; nothing of it is stored."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """All that a new controller must know."""

    plan: Plan
    desired: Desired
    revisions: Mapping[str, str]
    """Of the services that were started, by name."""
    plan_before: Plan | None = None
    """What an update is taken back to: the last other plan by which workers have served."""
    has_served: bool = False
    """Whether workers of each role have served by ``plan``."""


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
            StoppedMeanwhileError: as said there.
        """
        before = start_id(self._namespace)
        is_first = before != self._beginning.start_id
        wanted = self._beginning.wanted if is_first else None
        wanted = wanted or recall(self._namespace)
        if wanted is None:
            raise StoppedMeanwhileError("nothing is stored any more: it was stopped meanwhile")
        if is_first:
            # Without a bound: what a constructor raises, Ray takes for an end for good.
            self._put_unless_wiped(wanted, timeout_s=None)
            _delete(self._namespace, START_TIMES)
            _put(self._namespace, LATEST_START, self._beginning.start_id)
            clear(self._namespace, before)
        # After the storing: a stop that comes later finds what was stored, one before is seen here.
        if is_forbidden(self._namespace, self._controller_id):
            self.wipe()
            raise StoppedMeanwhileError("its deployment is being stopped")
        return wanted

    def count_start(self) -> None:
        """Remember one more start; Ray itself would start what crashes at once for ever.

        Raises:
            RuntimeError: there were too many of late. Raised in the constructor of an actor, it is
                what Ray takes for an end for good.
        """
        now = time.time()
        content = _get(self._namespace, START_TIMES)
        before: list[float] = [] if content is None else cloudpickle.loads(content)
        starts = [*(start for start in before if now - start < STARTS_WINDOW_S), now]
        if len(starts) > MAX_STARTS:
            raise RuntimeError(
                f"it crashed {MAX_STARTS} times in {now - starts[0]:.0f} s; see its log"
            )
        _put(self._namespace, START_TIMES, cloudpickle.dumps(starts))

    def put(self, wanted: Wanted) -> None:
        """Keep ``wanted`` for the next controller; nothing after ``wipe``.

        Raises:
            ray.exceptions.RpcError: the control service has not taken it in ``PUT_TIMEOUT_S``.
        """
        self._put_unless_wiped(wanted, timeout_s=PUT_TIMEOUT_S)

    def _put_unless_wiped(self, wanted: Wanted, *, timeout_s: float | None) -> None:
        with self._lock:
            if not self._is_wiped:
                key = _key(self._beginning.start_id)
                _put(self._namespace, key, cloudpickle.dumps(wanted), timeout_s)

    def wipe(self) -> None:
        """Forget what was stored, for good, though services are still seen to end."""
        with self._lock:
            self._is_wiped = True
            clear(self._namespace, self._beginning.start_id)


def start_id(namespace: str) -> bytes:
    """Return the id of the latest start in ``namespace``, though it be stopped by now."""
    return _get(namespace, LATEST_START) or b""


def forbid(namespace: str, controller_id: str) -> None:
    """Have a controller that has not begun yet never begin: it is about to be killed."""
    _put(namespace, STOPPED_CONTROLLER, controller_id.encode())


def is_forbidden(namespace: str, controller_id: str) -> bool:
    """Return whether somebody has stopped the deployment of that controller."""
    return _get(namespace, STOPPED_CONTROLLER) == controller_id.encode()


def recall(namespace: str) -> Wanted | None:
    """Return what was stored last; None: nothing, since all has been stopped or never began."""
    content = _get(namespace, _key(start_id(namespace)))
    return None if content is None else cloudpickle.loads(content)


def is_stored(namespace: str) -> bool:
    """Return whether a deployment was started in ``namespace`` and not stopped."""
    return _get(namespace, _key(start_id(namespace))) is not None


def clear(namespace: str, start: bytes) -> None:
    """Forget what was stored of ``start``, and of no other.

    But for its id: a controller that is not dead yet must not begin it again.
    """
    _delete(namespace, _key(start))


def _key(start: bytes) -> bytes:
    return b"wanted:" + start


def _get(namespace: str, key: bytes) -> bytes | None:
    return _internal_kv_get(key, namespace=namespace.encode())


def _put(namespace: str, key: bytes, content: bytes, timeout_s: float | None = None) -> None:
    if timeout_s is None:
        _internal_kv_put(key, content, namespace=namespace.encode())
    else:  # Ray's function of that name has no bound, and calls this
        client = internal_kv_get_gcs_client()
        client.internal_kv_put(
            key, content, overwrite=True, namespace=namespace.encode(), timeout=timeout_s
        )


def _delete(namespace: str, key: bytes) -> None:
    _internal_kv_del(key, namespace=namespace.encode())
