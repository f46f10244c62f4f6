"""However many ranks a worker has, its start ends within one bound, and says which rank is late."""

import socket
from types import SimpleNamespace

import pytest

from core.errors import InternalError
from ranks import followers
from ranks.followers import Follower, _Deadline, _losing
from ranks.frames import receive_frame


def test_one_deadline_is_for_all_followers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(followers, "time", SimpleNamespace(monotonic=lambda: clock.now))
    deadline = _Deadline(10.0)
    assert deadline.left_s() == 10.0
    clock.now += 7.0
    assert deadline.left_s() == pytest.approx(3.0)
    clock.now += 50.0
    assert 0 < deadline.left_s() < 1, "a socket with a timeout of 0 would not wait, but fail oddly"


@pytest.mark.parametrize(
    ("exit_code", "state"), [(None, "has not answered within 2.5 s"), (3, "ended with exit code 3")]
)
def test_a_late_follower_is_named_with_the_bound(exit_code: int | None, state: str) -> None:
    left, right = socket.socketpair()
    process = SimpleNamespace(join=lambda _: None, exitcode=exit_code)
    follower = Follower(1, process, left, left)  # type: ignore[arg-type]
    left.settimeout(0.01)
    with (
        pytest.raises(InternalError, match=f"rank 1 of this worker {state}"),
        _losing(follower, 2.5),
    ):
        receive_frame(left)
    left.close()
    right.close()
