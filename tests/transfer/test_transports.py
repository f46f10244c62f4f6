"""Which transport a name opens, what ``auto`` takes, and what a user reads when nothing loads."""

import logging
import os

import numpy as np
import pytest

from core.errors import ConfigError
from core.ids import Incarnation
from transfer.transport import Extent
from transfer.transports import open_transport
from transfer.ucx_library import LIBRARY_VARIABLE, load_ucx
from transfer.ucx_paths import path_of
from transfer.ucx_transport import UcxTransport

pytestmark = [pytest.mark.ucx]

X = Incarnation("x")


@pytest.mark.parametrize("name", ["ucx", "nixl"])
def test_a_name_opens_its_transport(name: str) -> None:
    transport = open_transport(name, X)
    assert transport.name == name
    transport.close()


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'rdma' is unknown; use one of: auto, ucx, nixl, ucxx"):
        open_transport("rdma", X)


def test_auto_takes_ucx_first(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        transport = open_transport("auto", X)
    assert transport.name == "ucx"
    assert "transport=ucx chosen=auto" in caplog.text
    transport.close()


def test_auto_falls_back_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, "/nowhere/libucp.so")
    with caplog.at_level(logging.INFO):
        transport = open_transport("auto", X)
    assert transport.name == "nixl"
    assert "/nowhere/libucp.so cannot be loaded" in caplog.text
    transport.close()


def test_a_library_that_is_not_ucx_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LIBRARY_VARIABLE, "libc.so.6")
        with pytest.raises(ConfigError, match=r"libc\.so\.6 cannot be loaded"):
            load_ucx()


@pytest.mark.parametrize("name", ["ucx"])
def test_a_wrong_setting_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"setting NO_SUCH=1"):
        open_transport(name, X, ucx_options={"NO_SUCH": "1"})
    with pytest.raises(ConfigError, match=r"setting RNDV_THRESH=many"):
        open_transport(name, X, ucx_options={"RNDV_THRESH": "many"})


@pytest.mark.parametrize(
    ("lanes", "memory", "kind", "description"),
    [
        (["sysv/memory", "posix/memory", "cma/memory"], "host", "shared_memory", "cma/memory"),
        (["sysv/memory", "xpmem/memory"], "host", "shared_memory", "xpmem/memory"),
        (["sysv/memory", "posix/memory"], "host", "tcp", "sysv/memory posix/memory by message"),
        (["tcp/lo", "tcp/eth0"], "host", "tcp", "tcp/lo tcp/eth0 by message"),
        (["rc_mlx5/mlx5_0:1", "tcp/eth0"], "host", "rdma", "rc_mlx5/mlx5_0:1"),
        (["dc_mlx5/mlx5_0:1"], "cuda", "rdma", "dc_mlx5/mlx5_0:1"),
        (["srd/rdmap0:1", "ud_verbs/x"], "host", "rdma", "srd/rdmap0:1"),
        (["ud_mlx5/mlx5_0:1"], "host", "tcp", "ud_mlx5/mlx5_0:1 by message"),
        (["cuda_ipc/cuda", "cma/memory"], "cuda", "cuda_ipc", "cuda_ipc/cuda"),
        (["cuda_copy/cuda", "cma/memory"], "cuda", "tcp", "cuda_copy/cuda cma/memory by message"),
    ],
)
def test_the_path_follows_from_the_lanes(
    lanes: list[str], memory: str, kind: str, description: str
) -> None:
    split = [(name.split("/")[0], name.split("/")[1]) for name in lanes]
    path = path_of(split, memory)  # type: ignore[arg-type]
    assert (path.kind, path.description) == (kind, description)


@pytest.mark.parametrize("options", [{}, {"TLS": "tcp"}], ids=["shared_memory", "tcp"])
def test_a_tear_down_destroys_the_peers_worker_and_no_other(options: dict[str, str]) -> None:
    """This is the proof that nothing of its reads is written any more, on any device."""
    mine, theirs = np.zeros(4096, dtype=np.uint8), np.ones(4096, dtype=np.uint8)
    reader = UcxTransport(X, ucx_options=options)
    reader.register(mine.ctypes.data, mine.nbytes)
    source = UcxTransport(Incarnation("s"), ucx_options=options)
    source.register(theirs.ctypes.data, theirs.nbytes)
    for name in ("one", "other"):
        reader.connect(Incarnation(name), source.endpoint())
        reader.read(Incarnation(name), [Extent(0, 0, 4096)])
    gone, kept = (reader._peers[Incarnation(name)].worker for name in ("one", "other"))
    reader.tear_down(Incarnation("one"))
    assert gone.handle == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(gone.descriptor)
    assert os.fstat(kept.descriptor)
    reader.close()
    assert kept.handle == 0
    source.close()
