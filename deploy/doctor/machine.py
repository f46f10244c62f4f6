"""What the kernel says of this machine and this container, as far as transfers depend on it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.doctor.findings import Finding

MIB: Final = 2**20
GIB: Final = 2**30
CAP_IPC_LOCK: Final = 14
CAP_SYS_PTRACE: Final = 19
MIN_MEMLOCK_NBYTES: Final = 512 * MIB
"""Below about this much, UCX leaves InfiniBand alone."""
MIN_SHM_NBYTES: Final = 256 * MIB
GOOD_CLOCKS: Final = frozenset(
    {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"}
)


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of one RDMA device."""

    name: str
    """Device and port, such as ``mlx5_0/1``."""
    state: str
    link: str
    rate: str

    @property
    def is_active(self) -> bool:
        """Whether it has a link."""
        return "ACTIVE" in self.state


class Machine:
    """Reads ``/proc``, ``/sys`` and ``/dev`` below ``root``."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def text(self, path: str) -> str | None:
        """Return a file's content; None: there is none, or it may not be read."""
        try:
            return (self._root / path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None

    def has_capability(self, bit: int) -> bool:
        """Whether a capability is effective for this process."""
        for line in (self.text("proc/self/status") or "").splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> bit & 1)
        return False

    def memlock_nbytes(self) -> int | None:
        """Return how much memory this process may lock; None: without limit."""
        for line in (self.text("proc/self/limits") or "").splitlines():
            if line.startswith("Max locked memory"):
                soft = line.split()[3]
                return None if soft == "unlimited" else int(soft)
        return None

    def may_lock(self, nbytes: int) -> bool:
        """Whether this process may lock so much."""
        limit = self.memlock_nbytes()
        return limit is None or limit >= nbytes or self.has_capability(CAP_IPC_LOCK)

    def meminfo_nbytes(self, field: str) -> int | None:
        """Return one line of ``/proc/meminfo``."""
        for line in (self.text("proc/meminfo") or "").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
        return None

    def available_nbytes(self) -> int | None:
        """Return the memory that new processes can have, within the container's limit."""
        found = [self.meminfo_nbytes("MemAvailable")]
        limit, used = (self.text(f"sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        if limit and limit != "max" and used:
            found.append(max(0, int(limit) - int(used)))
        return min((nbytes for nbytes in found if nbytes is not None), default=None)

    def rdma_ports(self) -> list[RdmaPort]:
        """Return every port of every RDMA device."""
        ports = sorted((self._root / "sys/class/infiniband").glob("*/ports/*"))
        return [
            RdmaPort(
                f"{port.parent.parent.name}/{port.name}",
                *(
                    self.text(str((port / field).relative_to(self._root))) or "unknown"
                    for field in ("state", "link_layer", "rate")
                ),
            )
            for port in ports
        ]

    def usable_rdma_ports(self) -> list[RdmaPort]:
        """Return the ports that have a link and whose devices this process may open."""
        verbs = list((self._root / "dev/infiniband").glob("uverbs*"))
        may_open = any(os.access(path, os.R_OK | os.W_OK) for path in verbs)
        return [port for port in self.rdma_ports() if port.is_active] if may_open else []

    def shm_nbytes(self) -> int | None:
        """Return the size of ``/dev/shm``."""
        try:
            stat = os.statvfs(self._root / "dev/shm")
        except OSError:
            return None
        return stat.f_frsize * stat.f_blocks


def check_machine(machine: Machine) -> list[Finding]:
    """Return what was found, RDMA first."""
    return [
        _rdma(machine),
        _memlock(machine),
        _shm(machine),
        _cma(machine),
        _hugepages(machine),
        _clock(machine),
    ]


def _rdma(machine: Machine) -> Finding:
    ports, usable = machine.rdma_ports(), machine.usable_rdma_ports()
    told = ", ".join(f"{p.name} {p.link} {p.rate}, {p.state}" for p in ports)
    if usable:
        return Finding("RDMA devices", "ok", told)
    if not ports:
        return Finding("RDMA devices", "ok", "none (in /sys/class/infiniband)")
    if any(port.is_active for port in ports):
        fix = (
            "give the container the devices: --device=/dev/infiniband, or the resource rdma/ib in "
            "Kubernetes"
        )
        return Finding("RDMA devices", "warn", f"{told}; /dev/infiniband can't be opened", fix)
    return Finding("RDMA devices", "warn", told, "no port has a link: check cable and switch")


def _memlock(machine: Machine) -> Finding:
    limit = machine.memlock_nbytes()
    has_lock = machine.has_capability(CAP_IPC_LOCK)
    told = "no limit" if limit is None else f"{limit / MIB:,.0f} MiB"
    text = f"{told}{', IPC_LOCK is effective' if has_lock else ''}"
    if machine.may_lock(MIN_MEMLOCK_NBYTES):
        return Finding("locked memory", "ok", text)
    if not machine.rdma_ports():
        return Finding("locked memory", "ok", f"{text}; enough without RDMA")
    fix = (
        "UCX leaves InfiniBand alone below 512 MiB: --ulimit memlock=-1 for the container, or run "
        "it as root with --cap-add=IPC_LOCK (for other users the capability is not effective)"
    )
    return Finding("locked memory", "fail", text, fix)


def _shm(machine: Machine) -> Finding:
    nbytes = machine.shm_nbytes()
    if nbytes is None:
        fix = "mount a tmpfs there: workers of one machine meet in it"
        return Finding("shared memory", "fail", "there is no /dev/shm", fix)
    text = f"{nbytes / GIB:,.1f} GiB in /dev/shm"
    if nbytes < MIN_SHM_NBYTES:
        fix = "--shm-size=1g for the container, or an emptyDir of medium Memory at /dev/shm"
        return Finding("shared memory", "warn", text, fix)
    return Finding("shared memory", "ok", text)


def _cma(machine: Machine) -> Finding:
    """Whether one worker may copy out of another's memory: ``process_vm_readv``."""
    scope = machine.text("proc/sys/kernel/yama/ptrace_scope")
    if scope in (None, "0"):
        return Finding("reads between processes", "ok", "allowed (CMA)")
    if machine.has_capability(CAP_SYS_PTRACE) and scope != "3":
        return Finding("reads between processes", "ok", "allowed by SYS_PTRACE (CMA)")
    fix = (
        "sysctl kernel.yama.ptrace_scope=0, or --cap-add=SYS_PTRACE; else workers of one machine "
        "exchange KV over TCP"
    )
    text = f"refused: kernel.yama.ptrace_scope={scope}"
    return Finding("reads between processes", "warn", text, fix)


def _hugepages(machine: Machine) -> Finding:
    thp = machine.text("sys/kernel/mm/transparent_hugepage/enabled") or "unknown"
    chosen = thp.partition("[")[2].partition("]")[0] or thp
    reserved = _reserved_hugepages(machine)
    return Finding("huge pages", "ok", f"transparent: {chosen}; reserved: {reserved}")


def _reserved_hugepages(machine: Machine) -> int:
    for line in (machine.text("proc/meminfo") or "").splitlines():
        if line.startswith("HugePages_Total:"):
            return int(line.split()[1])
    return 0


def _clock(machine: Machine) -> Finding:
    source = machine.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source is None or source in GOOD_CLOCKS:
        return Finding("clock", "ok", source or "unknown source")
    fix = "reading the time is a slow system call: choose tsc or the hypervisor's own clock"
    return Finding("clock", "warn", source, fix)
