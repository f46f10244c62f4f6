"""A wait for room says what is asked for and what there is."""

from deploy.shortage import shortage


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
