"""Calls into Ray that must not hang the stop: Ray waits for ever for a cluster that is gone."""

import threading
from collections.abc import Callable


def run_bounded(call: Callable[[], object], *, timeout_s: float) -> bool:
    """Run ``call`` and return whether it came to its end in time; else it is left behind.

    Raises:
        Exception: what ``call`` raised.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=run, name="ray-call", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    return not thread.is_alive()
