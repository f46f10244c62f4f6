"""What a worker process is told at its start."""

from dataclasses import dataclass
from pathlib import Path

from core.channel import ChannelKeys
from core.config import SluiceConfig
from core.ids import WorkerId


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Identity and surroundings of one prefill or decode worker, the same after a restart."""

    worker_id: WorkerId
    config: SluiceConfig
    model_path: Path
    """A local folder with config, tokenizer and safetensors."""
    served_name: str
    router_address: str
    """Of the control channels of all routers: ``tcp://host:port``, for each address of the host."""
    keys: ChannelKeys
    host: str
    """Address of this machine that the other workers and the router reach."""
    revision: str = ""
    """Short name of what its role runs by, told in heartbeats and ``GET /status``."""
