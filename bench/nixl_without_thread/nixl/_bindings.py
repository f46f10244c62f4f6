"""The bindings as they are."""

from nixl_cu12._bindings import *  # noqa: F403
from nixl_cu12._bindings import nixlXferTelemetry  # noqa: F401
