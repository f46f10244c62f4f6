"""Which services to start, drain and kill so that those there are become those wanted. Pure.

``Reconciler.decide`` is called again and again with what is wanted and what is seen; it takes the
time as an argument and acts on nothing. It remembers only what cannot be seen: who died how often
in a row, and since when somebody is drained. A reconciler that starts anew among running services
forgets those two, and goes on.

A service's way, as the reconciler sees it:

    Start -> pending -> starting -> ready ----------> draining -> ended (forgotten)
                 └──────────┴─────────┴─> dead -> Start after a wait, or given up

A controller that begins among running services sees each as ``adopted`` until it has answered: such
a one may serve, so that it is neither sent away nor made up for, but ended if it stays silent.
"""

from collections.abc import Mapping

from core.messages import Party
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
    Target,
)
from deploy.supervision.member import Member, backoff_s
from deploy.supervision.service_names import index_of, worker_name

KILL_AGAIN_S = 10.0
"""What is still not dead after so long is killed once more."""


class Reconciler:
    """Remembers deaths and drains; see the module."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._members: dict[str, Member] = {}
        self._generation = 0
        self._actions: list[Action] = []

    def limit(self, limits: Limits) -> None:
        """Go by ``limits`` from now on."""
        self._limits = limits

    def decide(
        self, now: float, desired: Desired, observed: Mapping[str, Observed]
    ) -> list[Action]:
        """Return what to do next. Empty when there is nothing to do but to wait.

        Args:
            now: Monotonic seconds.
            desired: What is wanted.
            observed: All services of the deployment by name, also those that have ended or died
                and were not forgotten or started anew since.
        """
        self._actions = []
        if desired.generation != self._generation:
            self._generation = desired.generation
            self._give_new_chances(now)
        self._see(now, observed)
        for name in list(self._members):
            self._follow_up(now, name, desired)
        for role, target in desired.targets.items():
            self._shrink(now, role, self._present(role, target, desired), desired)
        for name, member in list(self._members.items()):
            if member.state in {"dead", "refused"} and not member.is_given_up:
                self._revive(now, name, member, desired)
        for role, target in desired.targets.items():
            self._grow(now, role, self._present(role, target, desired), desired)
        return self._actions

    def _give_new_chances(self, now: float) -> None:
        for member in self._members.values():
            if member.is_given_up:
                member.is_given_up = False
                member.deaths = 1
                member.retry_at = now

    def _see(self, now: float, observed: Mapping[str, Observed]) -> None:
        for gone in self._members.keys() - observed.keys():
            del self._members[gone]
        for name, seen in observed.items():
            member = self._members.get(name)
            if member is None:
                member = Member(seen.role, seen.revision, seen.state, now)
                self._members[name] = member
                if seen.state == "dead":
                    self._count_death(now, member)
            elif member.state != seen.state:
                if seen.state == "dead" or (seen.state == "refused" and member.may_pass):
                    self._count_death(now, member)
                member.state, member.in_state_since = seen.state, now
            if seen.state == "ready":
                member.served_by = seen.revision
            if seen.state == "draining" and not member.is_leaving:
                member.is_leaving, member.leaving_since = True, now
            self._check_progress(now, name, member, seen.silence_s)

    def _count_death(self, now: float, member: Member) -> None:
        if member.state == "ready" and self._was_healthy(now, member):
            member.deaths = 0
        member.deaths += 1
        member.condemned_at = None
        member.retry_at = now + backoff_s(member.deaths, self._limits.restart_backoff_max_s)

    def _was_healthy(self, now: float, member: Member) -> bool:
        return now - member.in_state_since >= self._limits.healthy_after_s

    def _check_progress(self, now: float, name: str, member: Member, silence_s: float) -> None:
        limits = self._limits
        in_state_s = now - member.in_state_since
        is_watched = member.state in {"adopted", "ready", "draining"}
        if is_watched and silence_s > limits.progress_timeout_s:
            self._kill(now, name, member, f"no progress for {silence_s:.0f} s")
        elif member.state == "starting" and in_state_s > limits.start_timeout_s:
            self._kill(now, name, member, f"not ready after {in_state_s:.0f} s")
        elif (
            member.is_leaving
            and member.is_up
            and now - member.leaving_since > limits.drain_timeout_s
        ):
            self._kill(now, name, member, f"not drained after {limits.drain_timeout_s:.0f} s")

    def _kill(
        self, now: float, name: str, member: Member, reason: str, *, is_unwanted: bool = False
    ) -> None:
        if member.condemned_at is None or now - member.condemned_at >= KILL_AGAIN_S:
            member.condemned_at = now
            self._actions.append(Kill(name, reason, is_unwanted))

    def _follow_up(self, now: float, name: str, desired: Desired) -> None:
        """Follow up the end of a service, and send away whom the operator named."""
        member = self._members[name]
        if member.state == "ended" or (member.is_leaving and not member.is_up):
            self._forget(name)
        elif member.state == "adopted":
            pass  # what it does is not known yet
        elif name in desired.leaving and not self._is_last_to_serve(member, desired):
            self._send_away(now, name)

    def _is_last_to_serve(self, member: Member, desired: Desired) -> bool:
        """Return whether nothing would be served without ``member`` until another is ready.

        Without prefill workers all is served, only slower, so those go at once: two workers that
        change their roles crosswise must not wait for each other.
        """
        if member.role != "decode" or not member.serves or member.is_leaving:
            return False
        if desired.targets["decode"].replicas < 1:
            return False
        staying = self._staying("decode", desired).values()
        return not any(other.serves for other in staying)

    def _revive(self, now: float, name: str, member: Member, desired: Desired) -> None:
        target = desired.targets.get(member.role)
        if target is not None and member.revision != target.revision:
            # What it died of says nothing of the config that is wanted by now.
            member.deaths, member.retry_at = min(member.deaths, 1), now
        if member.retry_at is None:
            self._give_up(name, member, "its config cannot work")
        elif member.deaths > self._limits.max_restarts:
            self._give_up(name, member, f"it died {member.deaths} times in a row")
        elif target is not None and now >= member.retry_at:
            member.revision = target.revision
            self._start(now, name, member)

    def _give_up(self, name: str, member: Member, reason: str) -> None:
        member.is_given_up = True
        self._actions.append(GiveUp(name, reason))

    def _start(self, now: float, name: str, member: Member) -> None:
        member.state, member.in_state_since, member.retry_at = "pending", now, None
        member.condemned_at = None
        self._actions.append(Start(name, member.role, member.revision, member.deaths))

    def _send_away(self, now: float, name: str) -> None:
        """Drain what serves; end at once what does not."""
        member = self._members[name]
        if member.is_leaving:
            return
        if not member.is_up:
            self._forget(name)
            return
        member.is_leaving, member.leaving_since = True, now
        if member.condemned_at is not None:
            return
        if member.state == "ready":
            self._actions.append(Drain(name))
        else:
            self._kill(now, name, member, "not wanted any more", is_unwanted=True)

    def _forget(self, name: str) -> None:
        del self._members[name]
        self._actions.append(Forget(name))

    def _present(self, role: Party, target: Target, desired: Desired) -> Target:
        """Return the target less those whose predecessors of another role are still there."""
        awaited = sum(
            new_role == role and name in self._members for name, new_role in desired.leaving.items()
        )
        return Target(max(target.replicas - awaited, 0), target.revision)

    def _shrink(self, now: float, role: Party, target: Target, desired: Desired) -> None:
        while (victim := self._victim(role, target, desired)) is not None:
            self._send_away(now, victim)

    def _grow(self, now: float, role: Party, target: Target, desired: Desired) -> None:
        while self._may_start(role, target, desired):
            name = self._free_name(role, desired)
            self._members[name] = member = Member(role, target.revision, "pending", now)
            self._start(now, name, member)

    def _staying(self, role: Party, desired: Desired) -> dict[str, Member]:
        return {
            name: member
            for name, member in self._members.items()
            if member.role == role and not member.is_leaving and name not in desired.leaving
        }

    def _victim(self, role: Party, target: Target, desired: Desired) -> str | None:
        """Return whom of ``role`` to send away next; who is ready stays until enough others are."""
        staying = self._staying(role, desired)
        num_serving = sum(member.serves for member in staying.values())
        if len(staying) <= target.replicas:
            return self._next_to_replace(role, target, staying)
        num_new = sum(member.revision == target.revision for member in staying.values())
        old_go_first = num_new <= target.replicas and num_new < len(staying)
        candidates = [
            name
            for name, member in staying.items()
            if (member.revision != target.revision or not old_go_first)
            and (not member.serves or num_serving > target.replicas)
            and member.state != "adopted"
        ]
        return max(candidates, key=self._dispensability, default=None)

    def _next_to_replace(
        self, role: Party, target: Target, staying: Mapping[str, Member]
    ) -> str | None:
        """Return whom an update sends away next where there is no room for a successor beside it.

        One at a time, and only while all others serve: a revision that does not get ready stops
        the update at its first worker. Who does not serve yet goes first.
        """
        num_all = sum(member.role == role for member in self._members.values())
        is_complete = len(staying) == num_all == target.replicas
        if self._limits.max_surge or not is_complete:
            return None
        if (name := self._out_of_place(target, staying)) is not None:
            return name
        if not all(member.serves for member in staying.values()):
            return None
        old = [name for name, member in staying.items() if member.revision != target.revision]
        return max(old, key=index_of, default=None)

    def _out_of_place(self, target: Target, staying: Mapping[str, Member]) -> str | None:
        """Return one that waits or loads by what is not wanted, such as an update taken back.

        None also while one by what is wanted does not serve.
        """
        new = [member for member in staying.values() if member.revision == target.revision]
        if not all(member.serves for member in new):
            return None
        waiting = [
            name
            for name, member in staying.items()
            if member.revision != target.revision and member.state in {"pending", "starting"}
        ]
        return max(waiting, key=index_of, default=None)

    def _dispensability(self, name: str) -> tuple[bool, int]:
        return not self._members[name].serves, index_of(name)

    def _may_start(self, role: Party, target: Target, desired: Desired) -> bool:
        if role == "router" and "router" in self._members:
            return False  # it has one name, which a router that drains still has
        staying = self._staying(role, desired)
        # Whoever leaves for another role has the place of its successor there, not one here.
        num_all = sum(
            member.role == role and name not in desired.leaving
            for name, member in self._members.items()
        )
        if len(staying) < target.replicas:
            return self._limits.max_surge > 0 or num_all < target.replicas
        num_new = sum(member.revision == target.revision for member in staying.values())
        if num_new == len(staying) or num_new >= target.replicas:
            return False
        return num_all < target.replicas + self._limits.max_surge

    def _free_name(self, role: Party, desired: Desired) -> str:
        if role == "router":
            return "router"
        index = 0
        taken = self._members.keys() | desired.leaving.keys()
        while (name := worker_name(role, index)) in taken:
            index += 1
        return name
