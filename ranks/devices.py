"""Which accelerator a rank computes on: each process sees its own one alone.

So nothing in a rank, and no thread of it, can take another's device for the current one.
"""

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""Of CUDA, which reads it at its first use in a process."""


def visible_device(leader_sees: str | None, rank: int) -> str:
    """Return what ``rank`` is to see, given what its leader sees; None: every device.

    Out of range, it is none: CUDA then finds no device.
    """
    if leader_sees is None:
        return str(rank)
    devices = [device.strip() for device in leader_sees.split(",")]
    return devices[rank] if rank < len(devices) else ""
