"""Random lives of a deployment: whatever has happened, what is wanted is what there is in the end.

The failures guarded against: an order of events that nobody thought of, after which a service is
missing for ever, is there twice, or was sent away before another one served.
"""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from core.messages import Party
from deploy.supervision.desired import (
    Drain,
    State,
)
from tests.deploy.reconciled_world import LIMITS, World


class Cluster(RuleBasedStateMachine):
    """Any order of operators, ending pods, crashes, freezes and controller restarts."""

    max_surge = 1

    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            replace(LIMITS, max_surge=self.max_surge), has_router=True, prefill=1, decode=2
        )

    @rule(prefill=st.integers(0, 3), decode=st.integers(1, 4))
    def scale(self, prefill: int, decode: int) -> None:
        self.world.want(prefill=prefill, decode=decode)

    @rule(revision=st.sampled_from("abc"))
    def update(self, revision: str) -> None:
        self.world.want(revision=revision)

    @precondition(lambda self: self.world.names(state="ready"))
    @rule(data=st.data(), state=st.sampled_from(["dead", "ended", "refused"]))
    def lose(self, data: st.DataObject, state: State) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.names())))
        self.world.unheard.pop(name, None)
        self.world.put(name, state)

    @precondition(lambda self: self.world.names(state="ready"))
    @rule(data=st.data())
    def its_pod_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.names(state="ready"))))
        self.world.put(name, "draining")

    @precondition(lambda self: self.world.names(state="ready"))
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.names(state="ready"))))
        self.world.put(name, "ready", silence_s=99.0)

    @precondition(lambda self: self.world.names(state="pending"))
    @rule(data=st.data(), state=st.sampled_from(["starting", "ready", "dead"]))
    def come_up(self, data: st.DataObject, state: State) -> None:
        self.world.put(data.draw(st.sampled_from(sorted(self.world.names(state="pending")))), state)

    @precondition(lambda self: self.world.names(state="ready"))
    @rule(data=st.data())
    def change_role(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.names(state="ready"))))
        world = self.world
        roles: dict[Party, Party] = {"prefill": "decode", "decode": "prefill"}
        old = world.seen[name].role
        targets = dict(world.desired.targets)
        if old not in roles or name in world.desired.leaving or not targets[old].replicas:
            return
        for role, by in ((old, -1), (roles[old], 1)):
            targets[role] = replace(targets[role], replicas=targets[role].replicas + by)
        leaving = {**world.desired.leaving, name: roles[old]}
        world.desired = replace(world.desired, targets=targets, leaving=leaving)

    @rule()
    def controller_restarts(self) -> None:
        self.world.restart_controller()

    @precondition(lambda self: self.world.unheard)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.world.answer(data.draw(st.sampled_from(sorted(self.world.unheard))))

    @precondition(lambda self: self.world.unheard)
    @rule(data=st.data(), state=st.sampled_from(["adopted", "dead"]))
    def answer_never(self, data: st.DataObject, state: State) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.unheard)))
        self.world.put(name, state, silence_s=99.0)
        if state == "dead":
            del self.world.unheard[name]

    @rule(seconds=st.sampled_from([0.0, 1.0, 10.0, 70.0]))
    def decide(self, seconds: float) -> None:
        world = self.world
        ready_before = {
            role: sum(s.role == role and s.state == "ready" for s in world.seen.values())
            for role in world.desired.targets
        }
        leaving = set(world.desired.leaving)
        actions = world.act(seconds)
        if not self.max_surge:
            return  # an update may take the only one
        roles = {name: seen.role for name, seen in world.seen.items()}
        for role, target in world.desired.targets.items():
            drained = [
                a for a in actions
                if isinstance(a, Drain) and roles[a.name] == role and a.name not in leaving
            ]  # fmt: skip
            ready = ready_before[role]
            assert not drained or ready - len(drained) >= min(target.replicas, ready) - len(leaving)
        targets = world.desired.targets
        drains = [a for a in actions if isinstance(a, Drain) and roles[a.name] == "decode"]
        if drains and targets["decode"].replicas:
            assert ready_before["decode"] > len(drains), "nothing is served"

    def teardown(self) -> None:
        """Whatever has happened: in a kind world what is wanted is what there is, and stays."""
        world = self.world
        world.settle()
        world.want()
        world.settle()
        for role, target in world.desired.targets.items():
            there = [seen for seen in world.seen.values() if seen.role == role]
            assert len(there) == target.replicas, (role, target, world.seen)
            assert {(s.state, s.revision) for s in there} <= {("ready", target.revision)}
        assert world.act() == []


Cluster.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestCluster = Cluster.TestCase


class FullCluster(Cluster):
    """There is no room for one more."""

    max_surge = 0


FullCluster.TestCase.settings = Cluster.TestCase.settings
TestFullCluster = FullCluster.TestCase
