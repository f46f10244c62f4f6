"""Services as a reconciler's actions make them, with a fate that a test plays."""

from dataclasses import replace

from deploy.supervision.desired import (
    Action,
    Desired,
    Drain,
    Forget,
    GiveUp,
    Kill,
    Limits,
    Observed,
    Start,
    State,
    Target,
)
from deploy.supervision.reconciler import Reconciler

LIMITS = Limits(
    max_restarts=3,
    restart_backoff_max_s=8.0,
    healthy_after_s=100.0,
    start_timeout_s=300.0,
    drain_timeout_s=60.0,
    progress_timeout_s=30.0,
    max_surge=1,
)


class World:
    """Services as the actions make them; a test plays their fate."""

    def __init__(
        self, limits: Limits = LIMITS, *, has_router: bool = False, **replicas: int
    ) -> None:
        self.limits = limits
        self.now = 1000.0
        self.desired = Desired({"prefill": Target(0, "a"), "decode": Target(0, "a")})
        if has_router:
            self.desired = Desired({**self.desired.targets, "router": Target(1, "router")})
        self.want(**replicas)
        self.seen: dict[str, Observed] = {}
        self.unheard: dict[str, Observed] = {}
        """What those are that have not answered the latest controller yet."""
        self.reconciler = Reconciler(limits)

    def restart_controller(self) -> None:
        """Have another one that knows only whom there is."""
        self.reconciler = Reconciler(self.limits)
        for name, seen in self.seen.items():
            if seen.state in {"pending", "starting", "ready", "draining"}:
                self.unheard[name] = seen
                self.put(name, "adopted")
            elif seen.state != "adopted":
                self.put(name, "dead")

    def answer(self, name: str) -> None:
        """Have a service tell the controller what it is."""
        self.seen[name] = self.unheard.pop(name)

    def want(self, revision: str | None = None, **replicas: int) -> None:
        targets = dict(self.desired.targets)
        for role, target in targets.items():
            count = replicas.get(role, target.replicas)
            changes = revision is not None and role != "router"
            targets[role] = Target(count, revision if changes else target.revision)
        self.desired = replace(
            self.desired, targets=targets, generation=self.desired.generation + 1
        )

    def act(self, seconds: float = 0.0) -> list[Action]:
        self.now += seconds
        actions = self.reconciler.decide(self.now, self.desired, self.seen)
        for action in actions:
            self._carry_out(action)
        return actions

    def _carry_out(self, action: Action) -> None:
        match action:
            case Start(name, role, revision):
                assert name not in self.seen or self.seen[name].state in {"dead", "refused"}, action
                self.seen[name] = Observed(name, role, revision, "pending")
            case Drain(name):
                assert self.seen[name].state == "ready", action
                self.put(name, "draining")
            case Kill(name, reason):
                assert self.seen[name].state != "adopted" or reason.startswith("no progress")
                self.unheard.pop(name, None)
                self.put(name, "dead")
            case Forget(name):
                assert self.seen[name].state in {"ended", "dead", "refused"}, action
                del self.seen[name]
                leaving = {n: r for n, r in self.desired.leaving.items() if n != name}
                self.desired = replace(self.desired, leaving=leaving)
            case GiveUp():
                pass

    def put(self, name: str, state: State, silence_s: float = 0.0) -> None:
        self.seen[name] = replace(self.seen[name], state=state, silence_s=silence_s)

    def settle(self, rounds: int = 40) -> None:
        """Be kind: all start, all drain, until nothing more happens."""
        for _ in range(rounds):
            for name in list(self.unheard):
                self.answer(name)
            for name, seen in list(self.seen.items()):
                if seen.state in {"pending", "starting"}:
                    self.put(name, "ready")
                elif seen.state == "draining":
                    self.put(name, "ended")
                elif seen.silence_s:
                    self.put(name, seen.state)
            self.act(seconds=10.0)

    def names(self, *, state: State | None = None, revision: str | None = None) -> set[str]:
        return {
            name
            for name, seen in self.seen.items()
            if state in {None, seen.state} and revision in {None, seen.revision}
        }


def started(limits: Limits = LIMITS, **replicas: int) -> World:
    world = World(limits, **replicas)
    world.settle(2)
    return world
