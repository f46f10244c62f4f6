"""What is wanted of a deployment, and the commands that change it: stored, then answered."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from core.config import SluiceConfig
from core.errors import ConfigError
from core.messages import Party, Role
from deploy.supervision.desired import Observed
from deploy.supervision.launch import Plan
from deploy.supervision.outcome import Outcome, Refused, Taken, Unchanged
from deploy.supervision.scaling import rebased, scaled
from deploy.supervision.wanted import Wanted

log = logging.getLogger(__name__)


class Orders:
    """Any thread calls it. What is wanted can be looked at while something is being stored."""

    def __init__(self, wanted: Wanted, put: Callable[[Wanted], None]) -> None:
        """Go on with ``wanted``; ``put`` keeps it for the next controller, in some time."""
        self._put = put
        self._storing = threading.Lock()
        """Held while something is stored, so that nothing older is stored after it. Taken before
        the other."""
        self._stored = wanted
        """What was stored last. With the above held."""
        self._lock = threading.Lock()
        """Protects the field below. Never held for a call that may wait."""
        self._wanted = wanted

    @property
    def wanted(self) -> Wanted:
        """As it is by now."""
        with self._lock:
            return self._wanted

    def scale(
        self,
        counts: Mapping[Role, int],
        roles: Mapping[str, Role],
        observed: Mapping[str, Observed],
    ) -> Outcome:
        """Want ``counts`` of the roles, and the named ones of ``observed`` in other roles.

        Said again, it gives those that stay down new chances: it is never ``Unchanged``.
        """

        def change(wanted: Wanted) -> Wanted:
            revision = wanted.plan.revision
            return replace(
                wanted, desired=scaled(wanted.desired, observed, counts, roles, revision)
            )

        return self._change(change)

    def update(self, config: SluiceConfig) -> Outcome:
        """Replace all workers, few at a time, by such that run by ``config``."""
        return self._change(lambda wanted: _by(wanted, wanted.plan.updated(config), {}))

    def apply(self, config: SluiceConfig) -> Outcome:
        """As ``update``, and want as many workers as ``config`` says."""
        counts: Mapping[Party, int] = {**config.deploy.counts}
        return self._change(lambda wanted: _by(wanted, wanted.plan.updated(config), counts))

    def undo(self) -> Outcome:
        """Go by the last other config by which workers have served, or by the first one.

        Said twice, it goes forth again if workers have served by what it took back. The numbers of
        workers stay as they are wanted now.
        """

        def change(wanted: Wanted) -> Wanted:
            plan = wanted.plan_before
            if plan is None or plan == wanted.plan:
                raise ConfigError(
                    "nothing to take back: since the start, or since the last --undo, workers have "
                    "served by no other config"
                )
            return _by(wanted, plan, {})

        return self._change(change)

    def note_starts(self, revisions: Mapping[str, str]) -> None:
        """Services of these names may be there from now on."""
        with self._lock:
            self._wanted = replace(self._wanted, revisions={**self._wanted.revisions, **revisions})

    def note_served(self, plan: Plan) -> bool:
        """Workers of each role serve by ``plan``; return whether that is new, and still wanted."""
        with self._lock:
            is_new = plan == self._wanted.plan and not self._wanted.has_served
            if is_new:
                self._wanted = replace(self._wanted, has_served=True)
            return is_new

    def note_there(self, revisions: Mapping[str, str], observed: Mapping[str, Observed]) -> bool:
        """These are all that there are; return whether that is new."""
        with self._lock:
            desired = self._wanted.desired
            leaving = {name: role for name, role in desired.leaving.items() if name in observed}
            if (leaving, revisions) == (desired.leaving, self._wanted.revisions):
                return False
            desired = replace(desired, leaving=leaving)
            self._wanted = replace(self._wanted, desired=desired, revisions=dict(revisions))
            return True

    def store(self) -> None:
        """Store what is wanted by now, which is what the caller has put there or newer.

        Not again what another thread has stored meanwhile: nobody waits for more than two puts.
        """
        with self._storing:
            wanted = self.wanted
            if wanted != self._stored:
                self._put(wanted)
                self._stored = wanted

    def _change(self, change: Callable[[Wanted], Wanted]) -> Outcome:
        """Want what ``change`` makes of it, or say why not; the same object: it is so already."""
        with self._lock:
            before = self._wanted
            try:
                self._wanted = change(before)
            except ConfigError as error:
                return Refused(str(error))
            is_new = self._wanted is not before
        self.store()  # What was wanted already may not have been stored.
        return self._taken() if is_new else Unchanged()

    def _taken(self) -> Taken:
        wanted = self.wanted
        replicas: dict[Party, int] = {
            role: target.replicas for role, target in wanted.desired.targets.items()
        }
        told = " ".join(f"{role}={number}" for role, number in replicas.items())
        log.info("event=wanted %s leaving=%s", told, ",".join(wanted.desired.leaving) or "none")
        return Taken(wanted.plan.advice(replicas))


def _by(wanted: Wanted, plan: Plan, counts: Mapping[Party, int]) -> Wanted:
    """Return ``wanted`` with all workers by ``plan``; the same object: that is so already.

    What no worker has served by is not gone back to.

    Raises:
        ConfigError: names the number that cannot be.
    """
    desired = rebased(wanted.desired, counts, plan.revision)
    if (plan, desired.targets) == (wanted.plan, wanted.desired.targets):
        return wanted
    if plan == wanted.plan:
        return replace(wanted, desired=desired)
    is_gone_back_to = wanted.has_served or wanted.plan_before is None
    return replace(
        wanted,
        plan=plan,
        desired=desired,
        plan_before=wanted.plan if is_gone_back_to else wanted.plan_before,
        has_served=False,
    )
