"""Random lives of requests, with the proportions of a busy worker."""

import random

from tests.blockmgr.world import World


def run(world: World, rng: random.Random, num_events: int, *, recount_every: int = 1) -> None:
    """Let ``num_events`` random events happen, with the proportions of a busy worker."""
    events = {
        lambda: world.admit(rng.randrange(20), rng.randint(1, 10), local=rng.random() < 0.6): 5,
        lambda: world.dispatch(rng.getrandbits(24)): 8,
        world.execute: 8,
        lambda: world.complete(rng.randrange(3)): 8,
        lambda: world.release(rng.randrange(12)): 1.5,
        lambda: world.preempt(rng.randrange(12)): 0.5,
        lambda: world.fail_read(rng.randrange(12)): 0.5,
        lambda: world.begin_receive(rng.randrange(12), rng.randint(1, 5)): 4,
        lambda: world.join_receive(rng.randrange(12)): 3,
        lambda: world.land(rng.randrange(12)): 4,
        lambda: world.end_read(rng.randrange(12)): 4,
        lambda: world.begin_copy(rng.randrange(12)): 1,
        lambda: world.end_copy(rng.randrange(12)): 2,
        lambda: world.lease(rng.randrange(12)): 0.4,
        world.reset_cache: 0.1,
    }
    chosen = rng.choices(list(events), weights=list(events.values()), k=num_events)
    for number, event in enumerate(chosen):
        event()
        world.check(recount=number % recount_every == 0)
    world.finish()
