"""Processes that start at once: forked from a server that has imported all that a worker imports.

Most of what a worker's start takes are the imports of torch and transformers, and a test starts two
workers or more. Nothing runs in the server but imports: no thread, no device, no transport, no
socket. What is forked shares its seed of ``hash`` with the others, which processes with an
interpreter of their own do not: where it could matter, start those.
"""

import mmap
import multiprocessing
import os
import random
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from typing import Any

MAX_SHIFT_PAGES = 2**16


def forked_process(
    target: Callable[..., None], args: tuple[Any, ...], *, name: str | None = None
) -> BaseProcess:
    """Return a process to be started; it writes its errors to where this one writes its own then.

    All tests share one server, which ends with them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "tests.forked_imports"])
    return context.Process(target=_run, args=(_OurErrors(), target, args), name=name)


class _OurErrors:
    """Standard error of the process that sends this, as a descriptor of the one that gets it."""

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _descriptor_of, (reduction.DupFd(2),)


def _descriptor_of(sent: Any) -> int:
    return sent.detach()


def _run(errors: int, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.dup2(errors, 2)
    os.close(errors)
    _hole = _take_other_addresses()
    target(*args)


def _take_other_addresses() -> mmap.mmap:
    """Return a hole that makes what is mapped after it lie elsewhere than in other forks.

    Two that have their pools at one address would not notice which of the two is meant.
    """
    nbytes = random.randrange(1, MAX_SHIFT_PAGES) * mmap.PAGESIZE
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
