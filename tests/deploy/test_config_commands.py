"""An operator learns all that is wrong with a config, and where, before anything starts.

The failure guarded against: one error per start, each without its line; a pool that the kernel
kills at night; a value of which nobody knows any more who set it.
"""

from pathlib import Path

import pytest
import yaml

from core.config import SluiceConfig
from deploy.cli.parser import run
from deploy.config.advice import advise
from deploy.config.settings import load_settings
from deploy.doctor.machine import Machine


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sluice.yaml"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine of 16 GiB."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {16 * 2**20} kB\n")
    return Machine(tmp_path)


def checked(file: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    code = run(["config", "check", str(file), *more])
    return code, capsys.readouterr().out.replace(str(file), "f")


def test_every_error_comes_with_its_line_its_text_and_what_to_give(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("# a try\ncache:\n  block_size: 0\ndecode: {cache: {kv_type: x}}\n")
    code, out = checked(file, capsys, "--set", "router.port=70000")
    assert code == 2
    assert out == (
        "f:3:3: error: cache.block_size: Input should be greater than 0 (got 0)\n"
        "    3 |   block_size: 0\n"
        "      |   ^\n"
        "        cache.block_size takes: whole number, 1 to 2147483647\n"
        "        (tokens); default 16. Token slots in one block. Prefill and\n"
        "        decode may differ: one a multiple of the other; with sliding\n"
        "        windows decode's must not be the larger one.\n"
        "\n"
        "f:4:18: error: decode.cache.kv_type: unknown; did you mean cache.kv_dtype?\n"
        "    4 | decode: {cache: {kv_type: x}}\n"
        "      |                  ^\n"
        "\n"
        "--set router.port: error: Input should be less than or equal to 65535 (got 70000)\n"
        "        router.port takes: whole number, 0 to 65535 (port); default\n"
        "        8000. Of the API; 0: a free one.\n"
        "\n"
        "f: 3 errors, 0 warnings\n"
    )


def test_fields_that_do_not_go_together_show_both_lines(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("transfer:\n  lease_s: 5\n  renew_interval_s: 4\n")
    code, out = checked(file, capsys)
    assert code == 2
    assert out.startswith("f:3:3 and f:2:3: error: transfer: renew_interval_s must be at most")
    assert "    3 |   renew_interval_s: 4\n" in out
    assert "    2 |   lease_s: 5\n" in out


def test_what_a_workers_start_would_refuse_is_an_error(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("decode:\n  engine: {tensor_parallel_size: 2}\ncache: {poison: true}\n")
    code, out = checked(file, capsys)
    assert code == 2
    assert "f:2:12: error: decode workers: engine.tensor_parallel_size=2: " in out
    assert "cache.poison=True" in out
    assert "1 error," in out


def test_a_file_that_is_no_yaml_is_one_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("cache:\n\tblock_size: 1\n")
    assert run(["config", "check", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"sluice: error: {file}:2:1: not YAML: a tab; indent with spaces\n"


def test_a_warning_is_no_error(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("transfer: {read_timeout_s: 60}\n")
    code, out = checked(file, capsys)
    assert code == 0
    assert out.startswith("f:1:12: warning: transfer.lease_s=30 is shorter than read_timeout_s=60")
    assert out.endswith("f: 0 errors, 1 warning\n")


def test_a_variable_that_says_nothing_is_told(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("log_level: info\n")
    monkeypatch.setenv("SLUICE_CACHE_BLOCK_SIZE", "32")
    monkeypatch.setenv("SLUICE_ROUTER_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("SLUICE_CACHE", "/var/cache")
    monkeypatch.setenv("SLUICE_POISON", "0")
    text = (
        "f: warning: environment variable SLUICE_CACHE_BLOCK_SIZE says nothing; write "
        "SLUICE__CACHE__BLOCK_SIZE\n\nf: 0 errors, 1 warning\n"
    )
    assert checked(file, capsys) == (0, text)


def test_a_good_file_is_told_so(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("cache: {memory_gib: 0.001}\n")
    assert checked(file, capsys) == (0, "f: 0 errors, 0 warnings\n")


def test_what_keeps_the_roles_apart_is_an_error_at_both_lines(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("transfer: {transport: ucx}\nprefill: {transfer: {transport: nixl}}\n")
    code, out = checked(file, capsys)
    assert code == 2
    assert out.startswith(
        "f:2:22 and f:1:12: error: transfer.transport: prefill 'nixl', decode 'ucx': no KV can "
    )
    assert out.count("transfer.transport takes") == 1


def test_ranks_that_the_model_here_does_not_fit_are_an_error_with_those_that_do(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text('{"num_key_value_heads": 3}')
    file.write_text(f"model: {{model: {tmp_path}/m}}\nengine: {{tensor_parallel_size: 2}}\n")
    code, out = checked(file, capsys)
    assert code == 2
    assert "f:2:10: error: decode workers: engine.tensor_parallel_size=2: the model's 3 KV" in out
    assert "use 1 or 3" in out
    # And a folder that says nothing decides nothing
    (tmp_path / "m/config.json").write_text("[]")
    assert checked(file, capsys)[0] == 0


def test_keys_that_are_not_here_are_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("security: {keys_dir: /nowhere}\n")
    code, out = checked(file, capsys)
    assert code == 0
    assert "f:1:12: warning: on this machine: security.keys_dir: /nowhere/router.pub is" in out


def test_the_file_may_be_given_as_to_the_other_commands(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("{}")
    assert run(["config", "check", "--config", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: 0 errors, 0 warnings\n"
    for wrong in ([], [str(file), "--config", str(file)]):
        with pytest.raises(SystemExit, match="2"):
            run(["config", "check", *wrong])


# Advice


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("cache: {memory_gib: 9}", "take 18.1 GiB, and this machine has 16.0; lower"),
        ("decode: {cache: {host_tier_gib: 20}}", "take 22.1 GiB"),
        (
            "cache: {memory_gib: 4}\nengine: {tensor_parallel_size: 4}",
            "take 32.2 GiB, and this machine has 16.0",
        ),
        ("prefill: {cache: {block_size: 64}}", "64 on prefill and 16 on decode: KV is converted"),
        ("transfer: {lease_s: 20}", "transfer.lease_s=20 is shorter than read_timeout_s=30"),
        (
            "prefill: {transfer: {lease_s: 8, renew_interval_s: 1}}",
            "decode renews every 5 s and prefill's leases last 8 s",
        ),
        ("router: {request_timeout_s: 60}", "prefill_timeout_s=120 is longer than"),
        ("scheduler: {max_batch_tokens: 32}", "less than one token for each of max_num_seqs=64"),
        ("deploy: {decode: 10}\nrouter: {max_pending_requests: 600}", "than the 640 sequences"),
        (
            "cache: {host_tier_gib: 1, storage_url: 'memory:///'}",
            "memory:/// is each process's own",
        ),
        ("metrics: {port: 9400}", "2 workers on one machine cannot all listen there"),
        ("deploy: {ray_address: local}\nmetrics: {port: 9400}", "2 workers on one machine"),
        ("deploy: {prefill: 0}\nmetrics: {port: 8000}", "8000: the router listens there"),
        ("deploy: {prefill: 0}\nprefill: {cache: {memory_gib: 1}}", "no prefill worker is started"),
    ],
)
def test_a_combination_that_is_seldom_meant_is_told(
    content: str, text: str, machine: Machine
) -> None:
    config = SluiceConfig.parse(yaml.safe_load(content), source="f")
    (advice,) = advise(config, machine)
    assert text in advice.text
    assert advice.places


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"cache": {"memory_gib": 40}, "deploy": {"ray_address": "auto"}},
        {"cache": {"memory_gib": 40}, "model": {"device": "cuda"}},
        {"cache": {"memory_gib": 40, "num_blocks": 10}},
        {"deploy": {"prefill": 0}, "decode": {"cache": {"block_size": 64}}},
        {"decode": {"cache": {"kv_dtype": "float8_e4m3"}}},
        {"metrics": {"port": 9400}, "deploy": {"ray_address": "auto"}},
        {"metrics": {"port": 9400}, "deploy": {"prefill": 0, "decode": 1}},
    ],
)
def test_what_may_well_be_meant_is_not_warned_of(
    content: dict[str, object], machine: Machine
) -> None:
    assert advise(SluiceConfig.parse(content, source="f"), machine) == []


def test_a_cluster_that_the_environment_names_is_not_this_machine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SluiceConfig.parse(
        {"cache": {"memory_gib": 40}, "metrics": {"port": 9400}}, source="f"
    )
    assert len(advise(config, machine)) == 2
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    assert advise(config, machine) == []


def test_a_machine_whose_memory_is_unknown_is_not_judged(tmp_path: Path) -> None:
    config = SluiceConfig.parse({"cache": {"memory_gib": 10**5}}, source="f")
    assert advise(config, Machine(tmp_path)) == []


# Show


def test_show_prints_a_config_that_loads_with_the_origin_of_what_was_given(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("cache:\n  block_size: 32\nkv_groups: {head_window: {window: 8, heads: [0]}}\n")
    monkeypatch.setenv("SLUICE__DECODE__CACHE__BLOCK_SIZE", "16")
    monkeypatch.setenv("SLUICE__MODEL__REVISION", "007")
    arguments = ["--config", str(file), "--port", "9000", "--set", "cache.poison=true"]

    assert run(["config", "show", *arguments]) == 0

    out = capsys.readouterr().out
    given = [line.split(maxsplit=1)[0] + line.partition("#")[2] for line in out.splitlines()]
    assert [line.replace(str(file), "f") for line in given if " " in line] == [
        "revision: environment variable SLUICE__MODEL__REVISION",
        "block_size: f:2:3",
        "poison: --set cache.poison",
        "window: f:3:27",
        "heads: f:3:38",
        "port: --port",
        "decode: environment variable SLUICE__DECODE__CACHE__BLOCK_SIZE",
    ]
    monkeypatch.delenv("SLUICE__DECODE__CACHE__BLOCK_SIZE")
    monkeypatch.delenv("SLUICE__MODEL__REVISION")
    file.write_text(out)
    shown = load_settings(file, {})
    assert (shown.model.revision, shown.router.port, shown.cache.poison) == ("007", 9000, True)
    assert shown.for_role("decode").cache.block_size == 16


def test_show_of_a_role_has_its_overrides_in_place(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("cache: {block_size: 8, poison: true}\ndecode: {cache: {block_size: 16}}\n")
    assert run(["config", "show", "--config", str(file), "--role", "decode"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["block_size:", "16", "#", f"{file}:2:18"] in shown
    assert ["poison:", "true", "#", f"{file}:1:24"] in shown
    assert not any(line[0] in {"prefill:", "decode:"} for line in shown if "{" in line[-1])


def test_show_of_a_faulty_config_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", "--set", "cache.block_size=0"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    told = "--set cache.block_size: Input should be greater than 0 (got 0)"
    assert captured.err == f"sluice: error: {told}\n"
