"""A controller whose acting thread hangs, in a deployment without a driver, on a real Ray cluster.

The failures guarded against: a controller that answers every command while nothing is looked after,
since the one thread that does so waits for an answer that never comes; and one that is ended though
it does not hang, since it was suspended.
"""

from typing import Any

import pytest

from tests.deploy.ray_cluster import HEAD, said_on_a_cluster

PROGRAM = f"""
import json, os, signal, sys, tempfile, threading, time
from dataclasses import dataclass
from pathlib import Path
from tests.deploy.small_deployment import IdlePlan
import ray
from ray.exceptions import RayError
from deploy.supervision import controller
from deploy.supervision.lookup import find_controller, services_of
from deploy.supervision.outcome import Taken
from deploy.supervision.stopping import stop_all
from deploy.supervision.wanted import Beginning, first_wanted

ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False, _node_ip_address={HEAD!r})
folder = Path(tempfile.mkdtemp())
said = {{}}
BOUND_S = 120.0
STALL_LIMIT_S = 8.0

@dataclass(frozen=True)
class HangingPlan(IdlePlan):
    # Where the file is, the thread that starts a service takes it away and waits for ever.
    # Beside it that thread says in which process it is.
    hang: Path = folder

    def launch(self, role, name):
        Path(f"{{self.hang}}.pid").write_text(str(os.getpid()))
        if self.hang.exists():
            self.hang.unlink()
            threading.Event().wait()
        return super().launch(role, name)

class Deployment:
    def __init__(self, space, stall_limit_s):
        self.space, self.hang = space, folder / space
        wanted = first_wanted(HangingPlan(("obey", "obey"), hang=self.hang))
        controller.RemoteController.options(
            name=controller.NAME,
            namespace=space,
            runtime_env={{"env_vars": wanted.plan.environment}},
            lifetime="detached",
        ).remote(space, None, Beginning(wanted), stall_limit_s)

    def ask(self, method, *arguments):
        try:
            call = getattr(find_controller(self.space), method).remote(*arguments)
            return ray.get(call, timeout=60)
        except (RayError, AttributeError):
            return "no answer"

    def life(self):
        # Asked until it is answered: one that has no time just now is no other one.
        told = []
        until(lambda: told.append(self.ask("events", 0, 0, 0.0)) or told[-1] != "no answer")
        return told[-1][0]

    def is_whole(self, *names):
        rows = self.ask("services")
        return rows != "no answer" and {{r.name for r in rows if r.state == "ready"}} == set(names)

    def controller_pid(self):
        return int(Path(f"{{self.hang}}.pid").read_text())

    def pids(self):
        found = {{}}
        for name, service in services_of(self.space).items():
            try:
                found[name] = ray.get(service.identity.remote(), timeout=20).pid
            except RayError:
                pass
        return found

    def hang_amid_a_start(self):
        self.hang.touch()
        os.kill(self.pids()["decode-0"], signal.SIGKILL)
        until(lambda: not self.hang.exists())

def until(holds):
    deadline = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < deadline, said
        time.sleep(0.2)

watched, unwatched = Deployment("watched", STALL_LIMIT_S), Deployment("unwatched", 3600.0)
for each in (watched, unwatched):
    until(lambda: each.is_whole("router", "decode-0"))
lives, before = (unwatched.life(), watched.life()), watched.pids()

# When one was suspended for longer than it may hang, then it goes on.
frozen = watched.controller_pid()
os.kill(frozen, signal.SIGSTOP)
time.sleep(STALL_LIMIT_S + 2)
os.kill(frozen, signal.SIGCONT)
time.sleep(3)
said["goes_on"] = watched.life() == lives[1]

# When both hang amid the start of a worker, then one of them is there again, and so is the worker.
unwatched.hang_amid_a_start()
watched.hang_amid_a_start()
until(lambda: watched.life() != lives[1])
until(lambda: watched.is_whole("router", "decode-0"))
after = watched.pids()
said["same_router"] = after["router"] == before["router"]
said["decode_came_back"] = after["decode-0"] != before["decode-0"]
said["without_watchdog"] = [unwatched.life() == lives[0], sorted(unwatched.pids())]

# When the other one is told something, then it answers, and its successor does it.
said["scaled"] = unwatched.ask("scale", {{"decode": 2}}, {{}}) == Taken()
said["still_hangs"] = unwatched.life() == lives[0]
ray.kill(find_controller("unwatched"), no_restart=False)
until(lambda: unwatched.is_whole("router", "decode-0", "decode-1"))

# When it hangs again, then a stop ends all the same.
unwatched.hang_amid_a_start()
for each in (watched, unwatched):
    stop_all(each.space, 4.0)
spaces = "watched", "unwatched"
said["left"] = [find_controller(it) is not None or sorted(services_of(it)) for it in spaces]
ray.shutdown()
print(json.dumps(said))
"""

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(800)]


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    return said_on_a_cluster(PROGRAM, timeout_s=700.0)


def test_a_controller_that_hangs_is_started_anew_and_then_so_is_the_dead_worker(
    said: dict[str, Any],
) -> None:
    assert said["decode_came_back"]
    assert said["same_router"]


def test_a_controller_that_was_suspended_goes_on_when_it_is_let(said: dict[str, Any]) -> None:
    assert said["goes_on"]


def test_mutation_without_the_watchdog_it_hangs_on_and_the_worker_stays_dead(
    said: dict[str, Any],
) -> None:
    assert said["without_watchdog"] == [True, ["router"]]


def test_commands_are_answered_while_it_hangs_and_carried_out_by_the_next_one(
    said: dict[str, Any],
) -> None:
    assert said["scaled"]
    assert said["still_hangs"]


def test_a_stop_ends_a_deployment_whose_controller_hangs(said: dict[str, Any]) -> None:
    assert said["left"] == [[], []]
