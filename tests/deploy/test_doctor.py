"""The doctor says what is so, and what to do, before a deployment finds out the slow way.

The failures guarded against: a fleet that runs at a tenth of its speed because it fell back to
TCP and nobody was told; a container in which UCX leaves InfiniBand alone; two copies of UCX.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from core.config import SluiceConfig
from core.key_files import write_keys
from deploy.cli.parser import run
from deploy.doctor.config import check_config
from deploy.doctor.findings import Finding, worst
from deploy.doctor.libraries import check_loaded, check_others, on_loader_path
from deploy.doctor.machine import GIB, Machine, check_machine
from deploy.doctor.paths import (
    check_environment,
    check_local_path,
    check_remote_path,
    check_transport,
)
from deploy.doctor.peer import Seen
from deploy.doctor.trial import probe

LIMITS = "Limit Soft Limit Hard Limit Units\nMax locked memory  {limit}  {limit}  bytes"
SHM = Seen(
    transport="ucx",
    version="1.23.0",
    path_kind="shared_memory",
    path="cma/memory",
    gb_per_s=6.1,
    devices=["tcp/eth0", "cma/memory"],
)
TCP = Seen(transport="ucx", path_kind="tcp", path="tcp/lo", gb_per_s=1.5, devices=["tcp/eth0"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine without RDMA on which all is well."""
    files = {
        "proc/self/limits": LIMITS.format(limit="8388608"),
        "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n",
        "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 4\n",
        "proc/sys/kernel/yama/ptrace_scope": "0\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    }
    for name, content in files.items():
        write(tmp_path, name, content)
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def write(root: Path, name: str, content: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def add_rdma(root: Path, *, state: str = "4: ACTIVE", openable: bool = True) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1"
    write(root, f"{port}/state", state)
    write(root, f"{port}/link_layer", "InfiniBand")
    write(root, f"{port}/rate", "400 Gb/sec (4X NDR)")
    if openable:
        write(root, "dev/infiniband/uverbs0", "")


def find(root: Path, name: str) -> Finding:
    (finding,) = [f for f in check_machine(Machine(root)) if f.name == name]
    return finding


def test_a_machine_where_all_is_well_has_nothing_to_fix(root: Path) -> None:
    findings = check_machine(Machine(root))
    assert worst(findings) == "ok"
    assert [finding.fix for finding in findings] == [None] * len(findings)


def test_an_empty_proc_and_sys_break_nothing(tmp_path: Path) -> None:
    assert find(tmp_path, "shared memory").level == "fail"
    assert find(tmp_path, "clock").level == "ok"
    assert Machine(tmp_path).available_nbytes() is None


def test_little_locked_memory_matters_where_there_is_rdma(root: Path) -> None:
    assert find(root, "locked memory").level == "ok"
    add_rdma(root)
    finding = find(root, "locked memory")
    assert finding.level == "fail"
    assert finding.fix is not None
    assert "memlock=-1" in finding.fix
    assert "IPC_LOCK" in finding.fix


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("proc/self/limits", LIMITS.format(limit="unlimited")),
        ("proc/self/limits", LIMITS.format(limit=str(512 * 2**20))),
        ("proc/self/status", "CapEff:\t0000000000004000\n"),
    ],
)
def test_memory_may_be_locked_by_limit_or_by_capability(
    root: Path, name: str, content: str
) -> None:
    add_rdma(root)
    write(root, name, content)
    assert find(root, "locked memory").level == "ok"


def test_an_rdma_port_that_the_container_cannot_open_is_told(root: Path) -> None:
    add_rdma(root, openable=False)
    finding = find(root, "RDMA devices")
    assert finding.level == "warn"
    assert "rdma/ib" in (finding.fix or "")
    assert Machine(root).usable_rdma_ports() == []


def test_an_rdma_port_without_a_link_is_told(root: Path) -> None:
    add_rdma(root, state="1: DOWN")
    assert "no port has a link" in (find(root, "RDMA devices").fix or "")


@pytest.mark.parametrize(
    ("scope", "capabilities", "level"),
    [("0", 0, "ok"), ("1", 0, "warn"), ("1", 1 << 19, "ok"), ("3", 1 << 19, "warn")],
)
def test_reads_between_processes_need_permission(
    root: Path, scope: str, capabilities: int, level: str
) -> None:
    write(root, "proc/sys/kernel/yama/ptrace_scope", scope)
    write(root, "proc/self/status", f"CapEff:\t{capabilities:016x}\n")
    assert find(root, "reads between processes").level == level


def test_a_slow_clock_is_told(root: Path) -> None:
    write(root, "sys/devices/system/clocksource/clocksource0/current_clocksource", "acpi_pm")
    assert find(root, "clock").level == "warn"


def test_a_containers_memory_limit_counts(root: Path) -> None:
    assert Machine(root).available_nbytes() == 8 * GIB
    write(root, "sys/fs/cgroup/memory.max", str(5 * GIB))
    write(root, "sys/fs/cgroup/memory.current", str(3 * GIB))
    assert Machine(root).available_nbytes() == 2 * GIB


# Copies of UCX

MINE = ["/venv/libucp-b39.so.0.0.0", "/venv/libuct-114.so.0.0.0", "/venv/ucx/libuct_ib.so.0"]


def test_one_copy_and_its_modules_are_one_copy() -> None:
    assert check_loaded(MINE).level == "ok"


def test_two_loaded_copies_fail_and_are_named() -> None:
    finding = check_loaded([*MINE, "/usr/lib/libucp.so.0"])
    assert finding.level == "fail"
    assert "/usr/lib/libucp.so.0" in finding.text


def test_a_copy_on_the_loaders_path_is_a_warning_unless_it_is_ours(tmp_path: Path) -> None:
    other = tmp_path / "libucp.so.0"
    other.touch()
    (tmp_path / "libuct_ib.so.0").touch()
    found = on_loader_path({"LD_LIBRARY_PATH": f"/does/not/exist:{tmp_path}"})
    assert str(other) in found
    assert str(tmp_path / "libuct_ib.so.0") not in found
    assert check_others(MINE, [str(other)]).level == "warn"
    (tmp_path / "link.so").symlink_to(other)
    assert check_others([str(other)], [str(tmp_path / "link.so")]).level == "ok"


# What moving bytes has shown


def test_a_fallback_to_tcp_on_one_machine_is_a_warning() -> None:
    assert check_local_path(SHM).level == "ok"
    finding = check_local_path(TCP)
    assert finding.level == "warn"
    assert "fell back to TCP" in (finding.fix or "")


def test_between_machines_tcp_is_a_warning_and_rdma_is_well(root: Path) -> None:
    finding = check_remote_path(SHM, TCP, [])
    assert finding.level == "warn"
    assert "1.5 GB/s" in finding.text
    add_rdma(root)
    ports = Machine(root).usable_rdma_ports()
    assert "UCX did not take it" in (check_remote_path(SHM, TCP, ports).fix or "")
    with_rdma = Seen(transport="ucx", devices=["rc_mlx5/mlx5_0:1"])
    assert check_remote_path(with_rdma, TCP, ports).level == "ok"
    assert check_remote_path(SHM, Seen(error="refused"), []).level == "fail"


def test_settings_that_limit_ucx_are_told() -> None:
    assert check_environment({"UCX_LOG_LEVEL": "fatal", "HOME": "/"}).text == "none"
    assert check_environment({"UCX_PROTO_INFO": "y"}).level == "ok"
    finding = check_environment({"UCX_TLS": "tcp"})
    assert (finding.level, finding.text) == ("warn", "UCX_TLS=tcp")


def test_a_transport_that_does_not_open_fails_with_its_own_words() -> None:
    finding = check_transport("ucx", Seen(error="libucp is not found"), {})
    assert finding.level == "fail"
    assert "transfer.transport=ucx: libucp is not found" in finding.text
    assert "pip install nixl-cu12" in (finding.fix or "")
    finding = check_transport("ucxx", Seen(error="No module named 'ucxx'"), {})
    assert "nixl" not in (finding.fix or "")


def test_settings_that_leave_no_device_are_named_with_what_failed_first() -> None:
    nixl, ucx = Seen(error="transport nixl: a"), Seen(error="transport ucx: b")
    finding = check_transport("auto", nixl, {"UCX_TLS": "bogus"}, first=ucx)
    assert "transport nixl: a; before it, transport ucx: b" in finding.text
    assert (finding.fix or "").startswith("unset or correct UCX_TLS=bogus")


# The config


def checked(root: Path, **sections: Any) -> dict[str, Finding]:
    config = SluiceConfig.parse(sections, source="test")
    return {finding.name: finding for finding in check_config(config, Machine(root))}


def test_pools_that_do_not_fit_fail(root: Path) -> None:
    sizes = {"deploy": {"prefill": 1, "decode": 2}, "cache": {"memory_gib": 2.5}}
    assert checked(root, **sizes)["pools in memory"].level == "ok"
    finding = checked(root, **sizes, decode={"cache": {"memory_gib": 4}})["pools in memory"]
    assert finding.level == "fail"
    assert "1 prefill x 2.5 GiB and 2 decode x 4.06 GiB (staging included); 8.0" in finding.text
    with_tier = sizes | {"cache": {"memory_gib": 2.5, "host_tier_gib": 1}}
    assert checked(root, **with_tier)["pools in memory"].level == "fail"


def test_pools_in_gpu_memory_take_none_of_the_machines_and_are_said_to(root: Path) -> None:
    sizes = {"model": {"device": "cuda"}, "cache": {"memory_gib": 4000}}
    finding = checked(root, **sizes)["pools in memory"]
    assert finding.level == "ok"
    assert "1 decode x 0 GiB (pools are in GPU memory)" in finding.text


def test_the_pools_of_all_ranks_of_a_worker_count(root: Path) -> None:
    sizes = {"deploy": {"prefill": 1, "decode": 1}, "cache": {"memory_gib": 2.5}}
    assert checked(root, **sizes)["pools in memory"].level == "ok"
    finding = checked(root, **sizes, decode={"engine": {"tensor_parallel_size": 4}})
    assert finding["pools in memory"].level == "fail"
    assert "1 decode x 10.25 GiB (4 ranks, staging included)" in finding["pools in memory"].text


def test_the_staging_of_decode_ranks_counts_and_must_be_lockable(root: Path) -> None:
    sizes = {"deploy": {"prefill": 0}, "cache": {"memory_gib": 7.5}}
    assert checked(root, **sizes)["pools in memory"].level == "ok"
    found = checked(root, **sizes, transfer={"staging_mib": 1024})
    assert found["pools in memory"].level == "fail"
    add_rdma(root)
    write(root, "proc/self/limits", LIMITS.format(limit=str(8 * GIB)))
    assert checked(root, **sizes)["pools that RDMA must lock"].level == "ok"
    found = checked(root, **sizes, transfer={"staging_mib": 1024})
    assert found["pools that RDMA must lock"].level == "fail"


def test_a_pool_must_be_lockable_where_rdma_reads_it(root: Path) -> None:
    name = "pools that RDMA must lock"
    assert checked(root)[name].level == "ok"
    add_rdma(root)
    assert checked(root)[name].level == "fail"
    write(root, "proc/self/limits", LIMITS.format(limit=str(2 * GIB)))
    assert checked(root)[name].level == "ok"
    assert checked(root, cache={"memory_gib": 3})[name].level == "fail"


def test_keys_that_the_config_names_must_be_here(root: Path) -> None:
    write_keys(root / "keys")
    (root / "keys/prefill.key").unlink()  # of other machines
    assert "what the config names" not in checked(root, security={"keys_dir": f"{root}/keys"})
    assert "what the config names" not in checked(root)
    finding = checked(root, security={"keys_dir": "/nowhere"})["what the config names"]
    assert finding.level == "fail"
    assert "security.keys_dir: /nowhere/router.pub is missing" in finding.text


# For real


@pytest.mark.ucx
def test_the_doctor_tells_the_path_of_real_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    host = told["probes"]["host"]
    assert host["path_kind"] == "shared_memory"
    assert host["gb_per_s"] > 0
    assert any("libucp" in file for file in host["libraries"])
    assert told["probes"]["tcp"]["path_kind"] == "tcp"
    assert {finding["level"] for finding in told["findings"]} <= {"ok", "warn"}


@pytest.mark.ucx
def test_the_doctor_warns_of_a_fallback_to_tcp(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert run(["doctor"]) == 0
    lines = capsys.readouterr().out
    assert "they fell back to TCP" in lines
    assert "UCX_TLS=tcp" in lines


@pytest.mark.ucx
def test_a_transport_that_cannot_be_opened_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLUICE_UCX_LIBRARY", str(tmp_path / "libucp.so"))
    config = tmp_path / "sluice.yaml"
    config.write_text("transfer: {transport: ucx}\ncache: {memory_gib: 1000}\n")
    assert run(["doctor", "--config", str(config)]) == 1
    lines = capsys.readouterr().out
    assert "libucp.so cannot be loaded" in lines
    assert "lower cache.memory_gib" in lines


@pytest.mark.ucx
def test_a_process_that_dies_of_its_settings_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "no_such_transport")
    assert probe("ucx", ucx_options={}).error is not None
