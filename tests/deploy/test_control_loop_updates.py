"""An update, and what it is taken back to.

The failures guarded against: two bad updates in a row that are all an operator can go back to, an
update that changed nothing and whose undo takes back another, and a change that is forgotten with
the controller since it was never stored.
"""

import pytest

from core.config import SluiceConfig
from deploy.supervision.events import (
    GaveUp,
    ServiceEnded,
)
from deploy.supervision.outcome import Refused, Taken, Unchanged
from deploy.supervision.wanted import Wanted
from tests.deploy.controlled_world import OnePlan, World


@pytest.fixture
def world() -> World:
    return World()


def config_of(model: str) -> SluiceConfig:
    return SluiceConfig.model_validate({"model": {"model": model}})


def all_serve(world: World) -> None:
    """Let all who are wanted be ready by what is wanted, and no other be there."""
    for _ in range(12):
        world.step()
        for name, seen in list(world.services.seen.items()):
            world.services.put(name, "ended" if seen.state == "draining" else "ready")
    world.step()


def test_an_update_that_is_taken_back_is_the_config_before_with_the_numbers_of_now(
    world: World,
) -> None:
    all_serve(world)
    assert "nothing to take back" in str(world.orders.undo())
    assert world.orders.update(config_of("a")) == Unchanged()
    assert isinstance(world.orders.undo(), Refused), "that update changed nothing"
    assert world.orders.update(config_of("b")) == Taken()
    assert world.scale({"decode": 3}, {}) == Taken()
    assert world.orders.update(config_of("b")) == Unchanged()

    # When it is taken back, and again, then it goes back and forth; by a later controller, too
    for again, revision in enumerate(("a", "b", "a")):
        all_serve(world)
        world.begin()
        assert world.orders.undo() == Taken()
        assert world.wanted() == {"prefill": 1, "decode": 3}
        told = world.stored[-1]
        assert {target.revision for target in told.desired.targets.values()} == {revision}
        assert told.plan == OnePlan(revision_of_all=revision)
        assert told.desired.generation == 3 + again


def test_what_no_worker_has_served_by_is_not_gone_back_to(world: World) -> None:
    """Two bad updates one after the other would otherwise be all that is gone back and forth to.

    And an undo that is told twice, since its first answer was lost, stays what it is.
    """
    all_serve(world)
    assert world.orders.update(config_of("bad")) == Taken()
    world.step()
    assert world.orders.update(config_of("worse")) == Taken()
    world.step()
    assert world.orders.undo() == Taken()
    assert world.stored[-1].plan == OnePlan(revision_of_all="a")
    assert isinstance(world.orders.undo(), Refused)
    assert world.stored[-1].plan == OnePlan(revision_of_all="a")
    all_serve(world)
    assert world.orders.update(config_of("b")) == Taken()
    assert world.orders.undo() == Taken()
    assert world.stored[-1].plan == OnePlan(revision_of_all="a")


def test_the_first_config_is_gone_back_to_though_not_all_have_served_by_it(world: World) -> None:
    assert world.orders.update(config_of("b")) == Taken()
    assert world.orders.undo() == Taken()
    assert world.stored[-1].plan == OnePlan()


def test_what_could_not_be_stored_is_stored_when_it_is_asked_for_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update called unchanged would otherwise be forgotten with this controller."""

    def fail(_wanted: Wanted) -> None:
        raise RuntimeError("Ray's control service does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(world.orders, "_put", fail)
        with pytest.raises(RuntimeError):
            world.orders.update(config_of("b"))
    assert world.stored[-1].plan == OnePlan()
    world.orders.update(config_of("b"))
    assert world.stored[-1].plan == OnePlan(revision_of_all="b")


def test_a_worker_that_no_update_can_start_is_told_to_all_with_the_reason_until_it_is_taken_back(
    world: World,
) -> None:
    services = world.services
    world.step_until_ready()
    world.step()
    assert world.orders.update(config_of("b")) == Taken()
    world.step()
    assert services.seen["decode-2"].revision == "b"
    services.put("decode-2", "refused")
    services.events.append(ServiceEnded("decode-2", "cache.num_blocks: none fits"))
    world.step()
    world.step()
    before, after = services.told[-2:]
    assert (before.decode_revision, before.trouble) == ("b", ())
    reason = "its config cannot work: cache.num_blocks: none fits"
    assert after.trouble == (f"decode-2 stays down: {reason}",)
    assert after.edition > before.edition
    assert world.loop.events(0, 0, 0.0)[2][-1] == GaveUp("decode-2", reason)

    assert world.orders.undo() == Taken()
    for _ in range(3):
        world.step()
    assert services.seen.keys() == {"decode-0", "decode-1", "prefill-0"}
    assert {seen.state for seen in services.seen.values()} == {"ready"}
    assert (services.told[-1].decode_revision, services.told[-1].trouble) == ("a", ())
