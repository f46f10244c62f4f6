"""A wait for room says what is asked for and what there is: soon, and not for ever."""

from deploy.supervision.shortage import LOOK_S, RoomWatch, shortage


def test_it_names_who_waits_and_only_the_resources_asked_for() -> None:
    line = shortage(
        {"prefill-0": {"CPU": 4.0, "GPU": 0.0}, "decode-1": {"CPU": 1.0, "place": 1.0}},
        {"CPU": 8.0, "memory": 1e9, "place": 1.0},
        {"CPU": 2.0, "memory": 1e9},
    )
    assert line == (
        "no room for decode-1 (CPU 1, place 1), prefill-0 (CPU 4): "
        "the Ray cluster has CPU 2 of 8 free, place 0 of 1 free"
    )


def test_a_wait_is_told_at_the_second_look_once_and_again_when_it_changes() -> None:
    room = RoomWatch(now=0.0)
    asked: list[str | None] = [None, "a", "a", "a", "b", None, "b", "b"]
    told = [room.look((1 + n) * LOOK_S, lambda why=why: why) for n, why in enumerate(asked)]
    assert told == [None, None, "a", None, "b", None, None, "b"]


def test_between_its_looks_nobody_is_asked() -> None:
    room = RoomWatch(now=0.0)

    def asked() -> str:
        raise AssertionError

    assert room.look(LOOK_S / 2, asked) is None
