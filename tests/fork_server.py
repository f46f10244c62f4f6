"""Processes that start at once: forked from a server that has imported all that a worker imports.

Most of what a worker's start takes are the imports of torch and transformers, and a test starts two
workers or more. Nothing runs in the server but imports: no thread, no device, no transport, no
socket. What is forked shares its seed of ``hash`` with the others, which processes with an
interpreter of their own do not: where it could matter, start those.
"""

import mmap
import multiprocessing
import random
from multiprocessing.context import ForkServerContext

MAX_SHIFT_PAGES = 2**16


def fork_context() -> ForkServerContext:
    """Return how to start such a process; all tests share one server, which ends with them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "tests.forked_imports"])
    return context


def take_other_addresses() -> mmap.mmap:
    """Return a hole that makes what is mapped after it lie elsewhere than in other forks.

    Two that have their pools at one address would not notice which of the two is meant.
    """
    nbytes = random.randrange(1, MAX_SHIFT_PAGES) * mmap.PAGESIZE
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
