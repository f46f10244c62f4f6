"""A wrong argument, file, folder or port stops the start with one line, and nothing is started.

The failure guarded against: a traceback of forty lines, or a half-started deployment, where the
operator needs to know which value to change.
"""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from core.key_files import write_keys
from deploy.cli.parser import run
from tests.deploy.ray_cluster import ROOT
from tests.free_ports import refused_port
from tests.router.model_folder import make_model_folder

EXIT_USAGE = 2


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["serve", "--port", "http"], "--port: 'http' is no whole number"),
        (["serve", "--port", "70000"], "router.port"),
        (["serve", "--decode", "0"], "deploy.decode"),
        (["serve", "--prefill", "-1"], "deploy.prefill"),
        (["serve", "--config", "/does/not/exist.yaml"], "/does/not/exist.yaml"),
        (["serve", "--model", "./no/such/folder", "--port", "0"], "no/such/folder"),
        (["demo", "--model", "", "--port", "0"], "model ''"),
        (["serve", "--host", "192.0.2.1", "--port", "0"], "192.0.2.1"),
        (["serve", "--host", ""], "--host: router.host: String should have at least 1 character"),
        (["status", "--url", "ftp://somewhere"], "ftp://somewhere"),
        (["cache", "show", "--url", "ftp://somewhere"], "ftp://somewhere"),
        (["top", "--url", "http://a..b"], "--url 'http://a..b': "),
        (["cache", "reset", "--wait", "soon"], "--wait: 'soon' is not"),
        (["cache", "reset", "--wait", "-1"], "--wait: '-1' is not"),
        (["cache", "reset", "--wait", "nan"], "--wait: 'nan' is not"),
        (["cache", "reset", "--wait", "inf"], "--wait: 'inf' is not a number of seconds from 0"),
        (["cache", "reset", "--wait", "3601"], "from 0 to 3600"),
        (["cache"], "COMMAND"),
        (["trace"], "REQUEST"),
        (["trace", "cmpl-1", "--url", "ftp://somewhere"], "ftp://somewhere"),
        (["trace", "cmpl-1", "--out", "way.gif"], "way.gif: end it in .svg, .png, .json"),
        (["scale", "decode=1", "--name", "../run/a"], "--name: '../run/a' is no deploy.name"),
        (["down", "--name", "a" * 5000], "aaa' is no deploy.name, which has 1 to 63"),
        (["update", "--name", "A B"], "deploy.name"),
        (["scale", "--decode", "2"], "sluice scale: error: unrecognized arguments: --decode"),
        (["update", "new.yaml"], "sluice update: error: unrecognized arguments: new.yaml"),
        (["update", "--name", "a"], "say what to go by: --config FILE, or --set"),
        (["update", "--undo", "--set", "a=b"], "--undo goes back to the last config that served"),
        (["scale"], "prefill=N"),
        (["scale", "router=2"], "'router=2'"),
        (["scale", "decode=0"], "sluice down"),
        (["scale", "decode=-1"], "'decode=-1'"),
        (["scale", "decode=20000"], "'decode=20000': write decode=N with N at most 10000"),
        (["scale", "decode=" + "9" * 5000], "9...': write decode=N with N at most 10000"),
        (["scale", "x" * 5000], "x...': write prefill=N"),
        (["scale", "prefill=1", "prefill=2"], "'prefill=2': prefill is given twice"),
        (["scale", "--role", "decode-0=router"], "--role decode-0=router"),
        (
            ["scale", "--role", "decode-0=prefill", "--role", "decode-0=decode"],
            "--role decode-0=decode: decode-0 is given twice",
        ),
        (["serve", "--set", "deploy.lifetime=detached"], "deploy.ray_address"),
        (["start"], "start"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = run(argv)
    except SystemExit as leaving:
        code = leaving.code
    assert code == EXIT_USAGE
    assert named in one_error_line(capsys)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("router: {port: [1}", "not YAML"),
        ("- a list", "mapping"),
        ("routr: {}", "routr"),
        ("cache: {block_size: 0}", "cache.block_size"),
        ("transfer: {lease_s: .nan}", "transfer.lease_s"),
        ("transfer: {lease_s: 5, renew_interval_s: 4}", "renew_interval_s"),
        ("deploy: {decode: many}", "deploy.decode"),
    ],
)
def test_a_wrong_config_file_is_named_in_one_line(
    content: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sluice.yaml"
    file.write_text(content)
    assert run(["serve", "--config", str(file)]) == EXIT_USAGE
    line = one_error_line(capsys)
    assert named in line
    assert str(file) in line


def test_a_busy_port_is_named_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["serve", "--port", str(port)]) == EXIT_USAGE
    assert f"127.0.0.1:{port}" in one_error_line(capsys)


def test_a_router_of_its_own_names_a_busy_control_port_by_its_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    write_keys(tmp_path / "keys")
    command = ["router", "--model", str(make_model_folder(tmp_path / "model"))]
    command += ["--set", f"security.keys_dir={tmp_path / 'keys'}", "--port", "0"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run([*command, "--set", f"router.control_port={port}"]) == EXIT_USAGE
    told = f"router.control_port: cannot listen on 127.0.0.1:{port}"
    assert told in one_error_line(capsys)


def test_the_version_is_told_as_a_command_and_as_an_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["version"]) == 0
    told = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        run(["--version"])
    assert capsys.readouterr().out == told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
@pytest.mark.parametrize(
    ("command", "code"), [("version", 1), ("config reference", 1), ("--help", 0)]
)
def test_output_that_finds_no_room_is_told_in_one_line(command: str, code: int) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "deploy.main", *command.split()],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    line = "sluice: error: cannot write (No space left on device); make room, or write elsewhere\n"
    assert (done.returncode, done.stderr) == (code, line if code else "")


@pytest.mark.parametrize(("command", "code"), [("version", 0), ("update --set a=b", EXIT_USAGE)])
def test_a_command_whose_output_is_closed_is_carried_out(command: str, code: int) -> None:
    """As service managers do with what nobody reads."""
    line = f"exec {sys.executable} -m deploy.main {command} >&-"
    done = subprocess.run(
        ["sh", "-c", line], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == bool(code), done.stderr


def test_a_file_of_api_keys_that_cannot_be_read_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "none"
    assert run(["serve", "--port", "0", "--set", f"security.api_keys_file={file}"]) == EXIT_USAGE
    assert str(file) in one_error_line(capsys)


@pytest.mark.parametrize(
    "command", [["status"], ["cache", "show"], ["cache", "reset"], ["trace", "cmpl-1"]]
)
def test_commands_say_in_one_line_that_nothing_answers(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with refused_port() as port:
        assert run([*command, "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "nothing answers" in one_error_line(capsys)


def test_the_command_line_loads_neither_ray_nor_torch_before_it_must() -> None:
    """What is set for Ray is set before it is loaded, or a session of its own does not start."""
    program = (
        "import sys; import deploy.cli.parser, deploy.cluster.environment; "
        "sys.exit(' '.join({'ray', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.strip() == ""


def test_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == 0
    assert capsys.readouterr().out.startswith("sluice ")
