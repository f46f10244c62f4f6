"""Does a config fit this machine? Pure, but for what ``Machine`` reads."""

from collections.abc import Iterator

from core.config import SluiceConfig
from core.messages import Role
from deploy.doctor.findings import Finding
from deploy.doctor.here import missing_here, unlike_ranks
from deploy.doctor.machine import GIB, Machine


def check_config(config: SluiceConfig, machine: Machine) -> list[Finding]:
    """Return whether the pools of ``config`` fit and may be locked, and what it names is here."""
    return [_memory(config, machine), _memlock(config, machine), *_named(config)]


def pool_gib(config: SluiceConfig, role: Role) -> float:
    """Return the size of one rank's pool, where the config gives it in bytes."""
    cache = config.for_role(role).cache
    return 0.0 if cache.num_blocks is not None else cache.memory_gib


def staging_gib(config: SluiceConfig, role: Role) -> float:
    """Return what one rank has behind its pool, for KV that comes in another shape."""
    return config.for_role(role).transfer.staging_mib / 1024 if role == "decode" else 0.0


def worker_host_gib(config: SluiceConfig, role: Role) -> float:
    """Return the host memory that all ranks of one worker take for KV."""
    own = config.for_role(role)
    on_device = own.model.device == "cuda"
    rank_gib = 0.0 if on_device else pool_gib(config, role) + staging_gib(config, role)
    return own.engine.tensor_parallel_size * rank_gib + own.cache.host_tier_gib


def _memory(config: SluiceConfig, machine: Machine) -> Finding:
    name = "pools in memory"
    workers: list[tuple[Role, int]] = [
        (role, num) for role, num in config.deploy.counts.items() if num
    ]
    total_gib = sum(num * worker_host_gib(config, role) for role, num in workers)
    told = " and ".join(_told(config, role, num) for role, num in workers)
    if any(config.for_role(role).cache.num_blocks is not None for role, _ in workers):
        told += ", without pools given by cache.num_blocks, whose bytes depend on the model"
    available = machine.available_nbytes()
    if available is None:
        return Finding(name, "ok", f"{told}; the free memory of this machine is unknown")
    text = f"{told}; {available / GIB:.1f} GiB are free here"
    if total_gib * GIB > available:
        fix = "lower cache.memory_gib or cache.host_tier_gib, or start fewer workers or ranks here"
        return Finding(name, "fail", text, fix)
    return Finding(name, "ok", text)


def _told(config: SluiceConfig, role: Role, num_workers: int) -> str:
    own = config.for_role(role)
    parts: list[str] = []
    if own.engine.tensor_parallel_size > 1:
        parts.append(f"{own.engine.tensor_parallel_size} ranks")
    if own.model.device == "cuda":
        parts.append("pools are in GPU memory")
    elif role == "decode":
        parts.append("staging included")
    suffix = f" ({', '.join(parts)})" if parts else ""
    return f"{num_workers} {role} x {round(worker_host_gib(config, role), 2):g} GiB{suffix}"


def _named(config: SluiceConfig) -> Iterator[Finding]:
    for fault in (*unlike_ranks(config), *missing_here(config)):
        fix = "see the message; sluice config check names the line"
        yield Finding("what the config names", "fail", fault.text, fix)


def _memlock(config: SluiceConfig, machine: Machine) -> Finding:
    name = "pools that RDMA must lock"
    largest_gib = max(
        (
            pool_gib(config, role) + staging_gib(config, role)
            for role, num in config.deploy.counts.items()
            if num
        ),
        default=0.0,
    )
    if not machine.rdma_ports():
        return Finding(name, "ok", "no RDMA device: nothing is locked")
    if machine.may_lock(int(largest_gib * GIB)):
        return Finding(name, "ok", f"{round(largest_gib, 2):g} GiB in one process may be locked")
    fix = "--ulimit memlock=-1 for the container, or root with --cap-add=IPC_LOCK"
    text = f"{round(largest_gib, 2):g} GiB in one process are more than may be locked"
    return Finding(name, "fail", text, fix)
