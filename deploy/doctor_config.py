"""Does a config fit this machine? Pure, but for what ``Machine`` reads."""

from core.config import SluiceConfig
from core.messages import Role
from deploy.doctor_findings import Finding
from deploy.doctor_machine import GIB, Machine


def check_config(config: SluiceConfig, machine: Machine) -> list[Finding]:
    """Return whether the pools of ``config`` fit in memory, and may be locked."""
    return [_memory(config, machine), _memlock(config, machine)]


def pool_gib(config: SluiceConfig, role: Role) -> float:
    """Return the size of one worker's pool, where the config gives it in bytes."""
    cache = config.for_role(role).cache
    return 0.0 if cache.num_blocks is not None else cache.memory_gib


def _memory(config: SluiceConfig, machine: Machine) -> Finding:
    name = "pools in memory"
    workers: tuple[tuple[Role, int], ...] = (
        ("prefill", config.deploy.prefill),
        ("decode", config.deploy.decode),
    )
    on_host = [
        (pool_gib(config, role) if config.for_role(role).model.device != "cuda" else 0.0)
        + config.for_role(role).cache.host_tier_gib
        for role, _ in workers
    ]
    total_gib = sum(count * gib for (_, count), gib in zip(workers, on_host, strict=True))
    told = " and ".join(
        f"{count} {role} x {gib:g} GiB"
        for (role, count), gib in zip(workers, on_host, strict=True)
        if count
    )
    if any(config.for_role(role).cache.num_blocks is not None for role, _ in workers):
        told += ", without pools given by cache.num_blocks, whose bytes depend on the model"
    available = machine.available_nbytes()
    if available is None:
        return Finding(name, "ok", f"{told}; the free memory of this machine is unknown")
    text = f"{told}; {available / GIB:.1f} GiB are free here"
    if total_gib * GIB > available:
        fix = "lower cache.memory_gib or cache.host_tier_gib, or start fewer workers here"
        return Finding(name, "fail", text, fix)
    return Finding(name, "ok", text)


def _memlock(config: SluiceConfig, machine: Machine) -> Finding:
    name = "pools that RDMA must lock"
    largest_gib = max(pool_gib(config, "prefill"), pool_gib(config, "decode"))
    if not machine.rdma_ports():
        return Finding(name, "ok", "no RDMA device: nothing is locked")
    if machine.may_lock(int(largest_gib * GIB)):
        return Finding(name, "ok", f"{largest_gib:g} GiB in one worker may be locked")
    fix = "--ulimit memlock=-1 for the container, or root with --cap-add=IPC_LOCK"
    text = f"{largest_gib:g} GiB in one worker are more than may be locked"
    return Finding(name, "fail", text, fix)
