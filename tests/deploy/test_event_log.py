"""A driver hears every event of a controller, also of one that began anew, and none of them twice.

The failure guarded against: a driver that misses the end of a service, and waits for ever.
"""

import threading

from deploy.supervision.event_log import MAX_EVENTS, EventLog
from deploy.supervision.events import GaveUp


def numbered(*numbers: int) -> list[GaveUp]:
    return [GaveUp("decode-0", str(number)) for number in numbers]


def test_a_reader_goes_on_where_it_was() -> None:
    log = EventLog()
    log.append(numbered(1, 2))
    life, start, events = log.read(0, 0, 0.0)
    assert events == numbered(1, 2)
    log.append(numbered(3))
    assert log.read(life, start, 0.0) == (life, 3, numbered(3))
    assert log.read(life, 3, 0.0) == (life, 3, [])


def test_a_reader_of_another_life_hears_all_of_this_one() -> None:
    log = EventLog()
    log.append(numbered(1, 2))
    assert log.read(EventLog().read(0, 0, 0.0)[0], 7, 0.0)[2] == numbered(1, 2)


def test_a_reader_that_is_too_late_hears_the_latest() -> None:
    log = EventLog()
    log.append(numbered(*range(MAX_EVENTS + 5)))
    assert log.read(0, 0, 0.0)[2] == numbered(*range(5, MAX_EVENTS + 5))


def test_a_waiting_reader_is_woken_by_an_event() -> None:
    log = EventLog()
    heard: list[object] = []
    reader = threading.Thread(target=lambda: heard.append(log.read(0, 0, 60.0)[2]), daemon=True)
    reader.start()
    log.append(numbered(1))
    reader.join(20.0)
    assert heard == [numbered(1)]
