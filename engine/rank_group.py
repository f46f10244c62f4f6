"""The ranks that compute one model together, and the collectives that join their parts."""

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core.errors import ConfigError, InternalError

COLLECTIVE_TIMEOUT_S = 60.0
"""A rank that is this late is taken for lost; the step fails. The longest part of a layer between
two collectives is far shorter."""
LEADER = 0
"""The rank that samples, and that the rest of the worker runs on."""


class RankGroup:
    """One process's membership. Every rank makes the same calls in the same order.

    Each call is bounded: it raises ``InternalError`` when a rank is gone, or silent for
    ``COLLECTIVE_TIMEOUT_S``. On an accelerator it joins the current stream instead of waiting.
    """

    def __init__(self, *, rank: int, size: int, process_group: Any) -> None:  # noqa: ANN401
        self.rank = rank
        self.size = size
        self._process_group = process_group

    @classmethod
    def join(cls, store: Path, *, rank: int, size: int, device: torch.device) -> "RankGroup":
        """Return the membership once all ``size`` ranks have called this with one ``store``.

        ``store`` is a file that does not exist yet, in a folder that only this user may enter: who
        can write it can join. It may be removed when all ranks have joined.

        Raises:
            InternalError: a rank did not come in time.
        """
        try:
            process_group = _open(store, rank=rank, size=size, device=device)
            group = cls(rank=rank, size=size, process_group=process_group)
            # NCCL meets in the store at its first collective, not before.
            group.all_reduce(torch.zeros(1, device=device))
        except RuntimeError as error:
            raise InternalError(f"rank {rank} of {size} cannot join the others: {error}") from error
        return group

    def all_reduce(self, values: torch.Tensor) -> None:
        """Replace ``values`` by their sum over all ranks, the same bits on each."""
        self._wait(lambda: self._process_group.allreduce([values]))

    def broadcast(self, values: torch.Tensor) -> None:
        """Replace ``values`` by those of the leader."""
        self._wait(lambda: self._process_group.broadcast(values, LEADER))

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise InternalError(f"rank {self.rank}: another rank is lost: {error}") from error


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which part of a model a process loads, and how it meets those that have the other parts."""

    rank: int
    num_ranks: int
    join: Callable[[torch.device], RankGroup]
    """Called once, when this rank's part is loaded; returns when all ranks have theirs."""

    def check_device(self, device: torch.device) -> None:
        """Return if there can be one ``device`` per rank, as the leader sees it.

        A follower's process sees its own device alone.

        Raises:
            ConfigError: there are fewer devices than ranks.
        """
        if device.type != "cuda" or self.rank != LEADER:
            return
        available = torch.cuda.device_count()
        if available < self.num_ranks:
            raise ConfigError(
                f"engine.tensor_parallel_size={self.num_ranks}: this process sees {available} CUDA "
                "devices and needs one per rank; lower it, or set model.device: cpu"
            )


def _open(store: Path, *, rank: int, size: int, device: torch.device) -> Any:  # noqa: ANN401
    """Return torch's process group, which no other part of this process shares."""
    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    files = dist.FileStore(str(store), size)
    files.set_timeout(timeout)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout  # noqa: SLF001 - torch has no public name for it
        return dist.ProcessGroupNCCL(files, rank, size, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - as above
    gloo._timeout = timeout  # noqa: SLF001
    # By default gloo listens on the address of the machine's name, where others could connect.
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
    return dist.ProcessGroupGloo(files, rank, size, gloo)
