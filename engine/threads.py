"""Environment of a process that computes: its thread pools sleep while there is nothing to do.

OpenMP's idle threads spin by default, and workers that share a machine would take each other's
cores. Imports no torch: the libraries read these variables when they are loaded.
"""


def thread_environment(num_threads: int) -> dict[str, str]:
    """Return the variables to set before torch is imported.

    Args:
        num_threads: Of one worker; 0 leaves the number to the libraries, which take all cores.
    """
    passive = {
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }
    if num_threads == 0:
        return passive
    return passive | {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
