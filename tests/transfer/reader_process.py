"""A real reader that can be killed in mid-read.

Run as ``python -m tests.transfer.reader_process CONFIG``: it reads the whole pool of the source
over and over, and prints ``reading`` whenever a read is posted.
"""

import base64
import json
import os
import select
import sys

import numpy as np

from core.ids import Incarnation
from core.messages import PoolEndpoint
from transfer.transport import Extent
from transfer.transports import open_transport


def main() -> None:
    config = json.loads(sys.argv[1])
    endpoint = PoolEndpoint(
        transport=config["transport"],
        metadata=base64.b64decode(config["metadata"]),
        base_address=config["base_address"],
        nbytes=config["nbytes"],
    )
    pool = np.zeros(endpoint.nbytes, dtype=np.uint8)
    transport = open_transport(
        config["transport"], Incarnation("doomed"), ucx_options=config["ucx_options"]
    )
    transport.register(pool.ctypes.data, pool.nbytes)
    source = Incarnation("source")
    transport.connect(source, endpoint)
    size = endpoint.nbytes // config["num_blocks"]
    extents = [Extent(at, at, size) for at in range(0, endpoint.nbytes, size)]
    while True:
        transport.read(source, extents)
        os.write(1, b"reading\n")
        while not transport.poll():
            select.select([], [], [], 0.0005)


if __name__ == "__main__":
    main()
