"""What the figures were measured on, and whether anything else was running there."""

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil

_BUSY_FRACTION = 0.1
_OBSERVE_S = 2.0
_PACKAGES = ("sluice-llm", "torch", "transformers", "nixl-cu12", "ray")


def describe_machine() -> dict[str, object]:
    """Return the machine's parts, our packages' versions, and how busy it is before we start.

    Takes two seconds. ``alone`` is false where other work took a tenth of the CPUs meanwhile:
    absolute figures and ratios measured then mean little.
    """
    busy = psutil.cpu_percent(interval=_OBSERVE_S) / 100
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "amx": "amx_bf16" in _cpu_flags(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _gpu(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "busy_before": round(busy, 3),
        "alone": busy < _BUSY_FRACTION,
    }


def _cpuinfo(field: str) -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.machine()


def _cpu_flags() -> list[str]:
    return _cpuinfo("flags").split()


def _gpu() -> str | None:
    driver = Path("/proc/driver/nvidia/gpus")
    for information in sorted(driver.glob("*/information")):
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("Model:"):
                return line.removeprefix("Model:").strip()
    return None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
