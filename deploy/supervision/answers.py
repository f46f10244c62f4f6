"""An actor's answer, waited for in the main thread, where a stop must be heard meanwhile."""

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from deploy.supervision.stop_signals import StopInterrupt

STOP_LOOK_S = 0.2
"""Between two looks for a stop: none may be raised amid a call into Ray."""


def answer_of(call: ray.ObjectRef[Any], is_stop_asked: Callable[[], bool], timeout_s: float) -> Any:  # noqa: ANN401 - as ray.get
    """Return what ``call`` returns.

    Raises:
        StopInterrupt: a stop was asked for meanwhile.
        RayError: it failed, or is not over after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while not ray.wait([call], timeout=STOP_LOOK_S)[0]:  # pyright: ignore[reportUnknownMemberType]
        if is_stop_asked():
            raise StopInterrupt
        if time.monotonic() > deadline:
            raise GetTimeoutError
    return ray.get(call, timeout=timeout_s)
