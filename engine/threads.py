"""How many CPU threads a worker computes with, and how they wait.

Workers share a machine: a thread pool that spins while it has nothing to do takes the core that
another worker needs. The compiled kernels' own threads block between steps. torch's OpenMP pool
reads how to wait when it is loaded, so whoever starts a worker's process must put
``thread_environment`` into its environment, before torch is imported.
"""

import os


def thread_environment(num_threads: int) -> dict[str, str]:
    """Return the environment of a worker's process that computes with ``num_threads`` (0: all)."""
    count = str(num_threads or available_cores())
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        # GNU's OpenMP, which torch's wheels carry, spins for a while even under PASSIVE unless the
        # count is zero; LLVM's and Intel's go by the block time.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def available_cores() -> int:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_threads(num_threads: int) -> int:
    """Make torch compute with ``num_threads`` (0: all cores); return the count."""
    import torch  # noqa: PLC0415 - whoever only starts workers never loads it

    count = num_threads or available_cores()
    torch.set_num_threads(count)
    return count
