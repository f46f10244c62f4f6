"""A queue that loses a block shrinks the pool; one that doubles it gives it to two owners."""

import random
from collections import OrderedDict

import numpy as np

from blockmgr.block_queue import BlockQueue


def test_it_behaves_like_an_ordered_dictionary() -> None:
    # Given a queue small enough to be compacted often
    rng = random.Random(1)
    queue, model = BlockQueue(9), OrderedDict[int, None]()
    for _ in range(3000):
        # When a random batch comes, goes from anywhere, or is taken from the front
        absent = sorted(set(range(9)) - model.keys())
        batch = rng.sample(absent, rng.randint(0, len(absent)))
        queue.append(np.array(batch, dtype=np.int32))
        model.update(dict.fromkeys(batch))
        gone = rng.sample(list(model), rng.randint(0, len(model)) // 2)
        queue.remove(np.array(gone, dtype=np.int32))
        for block_id in gone:
            del model[block_id]
        count = rng.randint(0, len(model))

        # Then order and length are those of the model
        assert queue.first(count).tolist() == list(model)[:count]
        assert len(queue) == len(model)
        queue.check_invariants()
