"""What moving bytes has shown: findings of the probes."""

from collections.abc import Mapping

from deploy.doctor.findings import Finding
from deploy.doctor.machine import RdmaPort
from deploy.doctor.peer import Seen

_RDMA_PREFIXES = ("rc_", "dc_", "ud_", "srd/", "gga_")
_QUIET_VARIABLES = frozenset({"UCX_LOG_LEVEL", "UCX_WARN_UNUSED_ENV_VARS", "UCX_HANDLE_ERRORS"})
"""Set by workers themselves; they choose no path."""


def check_transport(
    asked: str, seen: Seen, environment: Mapping[str, str], *, first: Seen | None = None
) -> Finding:
    """Return which transport workers here will use.

    Args:
        asked: ``transfer.transport``.
        seen: By it.
        environment: Of the probe, and of workers.
        first: By ``ucx``, which ``auto`` tries first, where nothing opened.
    """
    if seen.error is not None:
        text = f"transfer.transport={asked}: {seen.error}"
        if first is not None and first.error is not None:
            text += f"; before it, {first.error}"
        return Finding("transport", "fail", text, _fix_of_transport(asked, environment))
    text = f"{seen.transport} (asked for: {asked}), UCX {seen.version}"
    return Finding("transport", "ok", text)


def _fix_of_transport(asked: str, environment: Mapping[str, str]) -> str:
    limits = [name for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in environment]
    if limits:
        told = " and ".join(f"{name}={environment[name]}" for name in limits)
        return f"unset or correct {told}: UCX finds no device that it allows; else see the message"
    if asked == "ucxx":
        return "see the message: nothing else installs ucxx"
    return "pip install nixl-cu12 brings UCX along; see the message"


def check_devices(seen: Seen) -> Finding:
    """Return what UCX could use."""
    return Finding("devices that UCX found", "ok", ", ".join(seen.devices) or "none")


def check_local_path(seen: Seen) -> Finding:
    """Return how bytes travel between workers of this machine."""
    name, rate = "workers of one machine", f"{seen.gb_per_s:.1f} GB/s for 64 MB"
    told = f"{seen.path_kind.replace('_', ' ')} ({seen.path}), {rate}"
    if seen.path_kind == "unknown":
        return Finding(name, "ok", f"{rate}; {seen.transport} does not tell by which path")
    if seen.path_kind != "tcp":
        return Finding(name, "ok", told)
    fix = (
        "they fell back to TCP: see the findings on reads between processes and on the "
        "environment; containers of one machine need a common IPC and PID namespace"
    )
    return Finding(name, "warn", told, fix)


def check_remote_path(seen: Seen, tcp: Seen, ports: list[RdmaPort]) -> Finding:
    """Return how bytes will travel between machines.

    Args:
        seen: By the path that was chosen.
        tcp: By TCP, between two processes of this machine.
        ports: Of RDMA, that this process may use.
    """
    name = "workers of several machines"
    rdma = [device for device in seen.devices if device.startswith(_RDMA_PREFIXES)]
    if rdma:
        return Finding(name, "ok", f"RDMA: {', '.join(rdma)}")
    if tcp.error is not None:
        fix = "workers on other machines could not be read from: see the message"
        return Finding(name, "fail", f"neither RDMA nor TCP: {tcp.error}", fix)
    text = f"TCP, as there is no RDMA: {tcp.gb_per_s:.1f} GB/s to a process of this machine"
    if ports:
        fix = (
            f"{ports[0].name} has a link, but UCX did not take it: see locked memory above, and "
            "UCX_TLS and UCX_NET_DEVICES"
        )
        return Finding(name, "warn", text, fix)
    fix = "nothing, on one machine; else RDMA devices, or expect 1 to 3 GB/s at best"
    return Finding(name, "warn", text, fix)


def check_environment(environment: Mapping[str, str]) -> Finding:
    """Return the settings of UCX that workers started from here would have."""
    chosen = sorted(
        f"{name}={value}"
        for name, value in environment.items()
        if name.startswith(("UCX_", "SLUICE_UCX_")) and name not in _QUIET_VARIABLES
    )
    if not chosen:
        return Finding("settings in the environment", "ok", "none")
    text = ", ".join(chosen)
    if any(name.startswith(("UCX_TLS=", "UCX_NET_DEVICES=")) for name in chosen):
        fix = "they limit what UCX may choose: unset them unless that is meant"
        return Finding("settings in the environment", "warn", text, fix)
    return Finding("settings in the environment", "ok", text)
