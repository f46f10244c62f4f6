"""The link is shared: each byte is read once, nobody waits for a long read, each read ends once.

Without the queue a 64 MB read over shared memory, where a post is the copy, holds the event loop
for its whole length, and a short request behind it waits as long.
"""

import dataclasses
import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InternalError
from core.ids import Attempt, Incarnation, OperationId, Owner, RequestId
from transfer.quanta import EndedRead, Quantum, QueueLimits
from transfer.read_queue import ReadQueue
from transfer.split import joined, split

QUANTUM = 64 * 1024
LIMITS = QueueLimits(QUANTUM, max_peer_nbytes=4 * QUANTUM, max_total_nbytes=6 * QUANTUM)
P, Q = Incarnation("P"), Incarnation("Q")


def who(name: str | int) -> Owner:
    return RequestId(str(name)), Attempt(1)


def rows(*extents: tuple[int, int, int]) -> np.ndarray:
    return np.array(extents, dtype=np.int64).reshape(-1, 3)


def blocks(start: int, count: int, nbytes: int = 4096) -> np.ndarray:
    """Scattered: nothing is adjacent."""
    at = (start + np.arange(count)) * 2 * nbytes
    return np.stack([at, at + nbytes, np.full(count, nbytes)], axis=1)


def bytes_of(extents: np.ndarray) -> Counter[tuple[int, int]]:
    return Counter((a + i, b + i) for a, b, n in extents.tolist() for i in range(n))


class Link:
    """Posts what the queue says, and keeps what is in flight."""

    def __init__(self, limits: QueueLimits = LIMITS) -> None:
        self.queue = ReadQueue(limits)
        self.in_flight: list[Quantum] = []
        self.posted: list[Quantum] = []
        self.ends: list[EndedRead] = []
        self._operations = iter(range(1, 10_000))

    def add(self, owner: Owner, *parts: tuple[Incarnation, np.ndarray]) -> OperationId:
        operation = OperationId(next(self._operations))
        self.queue.add(operation, owner, parts, 0.0)
        return operation

    def post(self) -> int:
        """Post all that may be posted now."""
        before = len(self.posted)
        while (quantum := self.queue.next()) is not None:
            self.in_flight.append(quantum)
            self.posted.append(quantum)
        return len(self.posted) - before

    def land(self, at: int = 0, failure: str | None = None) -> None:
        self.ends += self.queue.ended(self.in_flight.pop(at), failure)

    def run(self) -> None:
        while self.post() or self.in_flight:
            self.land()
        self.queue.check_invariants()


def test_a_long_read_is_cut_and_a_short_one_waits_for_one_quantum_of_each_other() -> None:
    link = Link()
    for name in ("long", "longer"):
        link.add(who(name), (P, rows((0, 0, 100 * QUANTUM))))
    link.post()
    short = link.add(who("short"), (P, rows((0, 0, 4096))))
    link.land()
    num_before = len(link.posted)
    link.run()
    turns = [quantum.operations for quantum in link.posted[num_before:]]
    assert turns.index((short,)) <= 2
    assert max(quantum.nbytes for quantum in link.posted) == QUANTUM
    assert len(link.ends) == 3


def test_a_read_that_is_alone_has_longer_turns_within_the_bounds_until_another_comes() -> None:
    link = Link(dataclasses.replace(LIMITS, lone_quantum_nbytes=3 * QUANTUM))
    link.add(who("long"), (P, rows((0, 0, 100 * QUANTUM))))
    link.post()
    assert [quantum.nbytes for quantum in link.posted] == [2 * QUANTUM, 2 * QUANTUM]
    assert link.queue.in_flight_nbytes == LIMITS.max_peer_nbytes
    assert max(quantum.extents[:, 2].max() for quantum in link.posted) == QUANTUM
    # When another waits, too
    short = link.add(who("short"), (P, rows((0, 0, 4096))))
    link.land()
    num_before = len(link.posted)
    link.post()
    # Then turns are short again, and the other has one of the next two
    turns = link.posted[num_before : num_before + 2]
    assert (short,) in [quantum.operations for quantum in turns]
    assert max(quantum.nbytes for quantum in turns) <= QUANTUM


def test_bandwidth_is_shared_by_bytes_whatever_the_size_of_blocks() -> None:
    link = Link()
    link.add(who("contiguous"), (P, rows((0, 0, 64 * QUANTUM))))
    link.add(who("blocks"), (P, blocks(0, 1000, 3000)))
    link.add(who("large blocks"), (P, blocks(0, 100, 50_000)))
    cost: Counter[tuple[OperationId, ...]] = Counter()
    for _ in range(60):
        link.post()
        link.land()
    for quantum in link.posted[:45]:
        cost[quantum.operations] += quantum.nbytes + 8192 * len(quantum.extents)
    assert max(cost.values()) < 1.35 * min(cost.values())


def test_in_flight_is_bounded_for_a_peer_and_in_total_but_no_peer_waits_for_another() -> None:
    link = Link()
    for peer in ("frozen", "slow", "also slow"):
        link.add(who(peer), (Incarnation(peer), rows((0, 0, 50 * QUANTUM))))
    link.post()
    per_peer = Counter(quantum.peer for quantum in link.in_flight)
    assert per_peer[Incarnation("frozen")] <= 4
    assert link.queue.in_flight_nbytes <= LIMITS.max_total_nbytes
    # When a fourth peer comes while nothing of the others ends
    link.add(who("new"), (Incarnation("new"), rows((0, 0, 3 * QUANTUM))))
    link.post()
    # Then it has its quantum nevertheless, one after the other
    for _ in range(3):
        (at,) = [i for i, q in enumerate(link.in_flight) if q.peer == Incarnation("new")]
        link.land(at)
        link.post()
    assert [end.failure for end in link.ends] == [None]


def test_a_failed_quantum_fails_its_read_once_all_of_it_is_terminal() -> None:
    link = Link()
    operation = link.add(who("r"), (P, rows((0, 0, 10 * QUANTUM))))
    link.post()
    assert len(link.in_flight) == 4
    link.land(2, failure="reset")
    assert link.ends == []
    assert link.post() == 0, "nothing more of a failed read is posted"
    link.land()
    link.land()
    assert link.ends == []
    link.land()
    (end,) = link.ends
    assert (end.operation, end.failure, end.is_cancelled) == (operation, "reset", False)
    assert not link.queue.has_unposted


def test_a_cancelled_read_posts_no_more_and_ends_when_what_is_posted_has_ended() -> None:
    link = Link()
    operation = link.add(who("r"), (P, rows((0, 0, 10 * QUANTUM))))
    waiting = link.add(who("r"), (P, rows((0, 0, QUANTUM))))
    link.post()
    assert link.queue.cancel(waiting)[0].is_cancelled, "none of it was posted"
    assert link.queue.cancel(operation) == []
    assert link.queue.cancel(operation) == []
    for _ in range(4):
        assert link.post() == 0
        assert link.ends == []
        link.land()
    (end,) = link.ends
    assert end.is_cancelled
    assert end.failure is None
    assert end.nbytes == 4 * QUANTUM


def test_a_read_that_is_posted_wholly_is_not_cancelled() -> None:
    link = Link()
    operation = link.add(who("r"), (P, rows((0, 0, QUANTUM))))
    link.post()
    assert link.queue.cancel(operation) == []
    link.land()
    assert not link.ends[0].is_cancelled
    assert link.queue.cancel(operation) == []


def test_a_lost_peer_takes_its_unposted_reads_with_it_and_no_others() -> None:
    link = Link()
    posted = link.add(who("a"), (P, rows((0, 0, 10 * QUANTUM))))
    unposted = link.add(who("a"), (P, rows((0, 0, QUANTUM))))
    other = link.add(who("b"), (Q, rows((0, 0, 3 * QUANTUM))))
    link.post()
    assert [end.operation for end in link.queue.drop(P, "torn down")] == [unposted]
    for at in reversed(range(len(link.in_flight))):
        if link.in_flight[at].peer == P:
            link.land(at, failure="torn down")
    link.run()
    ends = {end.operation: end.failure for end in link.ends}
    assert ends == {posted: "torn down", other: None}


def test_adjacent_blocks_of_an_owners_tickets_are_one_descriptor() -> None:
    link = Link()
    first = link.add(who("r"), (P, rows((0, 1000, 500))))
    second = link.add(who("r"), (P, rows((500, 1500, 500), (2000, 9000, 10))))
    third = link.add(who("s"), (P, rows((1000, 2000, 500))))
    link.post()
    merged, other = link.posted
    assert merged.operations == (first, second)
    assert merged.extents.tolist() == [[0, 1000, 1000], [2000, 9000, 10]]
    assert other.operations == (third,)
    link.land()
    assert {end.operation for end in link.ends} == {first, second}


def test_reads_from_several_peers_are_one_operation() -> None:
    link = Link()
    operation = link.add(who("r"), (P, blocks(0, 3)), (Q, blocks(5, 3)), (P, rows()))
    link.post()
    assert {quantum.peer for quantum in link.posted} == {P, Q}
    link.land()
    assert link.ends == []
    link.land()
    assert [end.operation for end in link.ends] == [operation]


def test_what_cannot_be_right_is_refused() -> None:
    link = Link()
    with pytest.raises(InternalError):
        link.add(who("r"), (P, rows()))
    operation = link.add(who("r"), (P, blocks(0, 1)))
    with pytest.raises(InternalError):
        link.queue.add(operation, who("r"), [(P, blocks(0, 1))], 0.0)
    link.post()
    quantum = link.in_flight[0]
    link.land()
    with pytest.raises(InternalError):
        link.queue.ended(quantum)


sizes = st.integers(1, 500)


@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=20), st.integers(1, 300))
def test_splitting_keeps_every_byte(cut: list[tuple[int, int]], limit: int) -> None:
    extents = rows(*((gap * 7, gap * 3, nbytes) for gap, nbytes in cut))
    parts = split(extents, limit)
    assert parts[:, 2].max() <= limit
    assert (parts[:, 2] > 0).all()
    assert parts[:, 2].sum() == extents[:, 2].sum()
    again = iter(parts.tolist())
    for local, remote, nbytes in extents.tolist():
        done = 0
        while done < nbytes:
            a, b, n = next(again)
            assert (a, b) == (local + done, remote + done)
            done += n
        assert done == nbytes


@given(st.lists(st.lists(st.integers(0, 40), max_size=6), min_size=1, max_size=6))
def test_joining_keeps_every_byte(parts: list[list[int]]) -> None:
    made = [rows(*((at * 4, at * 4 + 100, 4) for at in part)) for part in parts if part]
    if made:
        assert bytes_of(joined(made)) == bytes_of(np.concatenate(made))


SMALL = QueueLimits(
    quantum_nbytes=64, max_peer_nbytes=200, max_total_nbytes=300, lone_quantum_nbytes=150
)


class Draws:
    """A link whose reads, cancels, landings and failures come in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.link = Link(SMALL)
        self.wanted: dict[OperationId, Counter[tuple[int, int]]] = {}
        self.given_up: set[OperationId] = set()
        self.base = 0

    def step(self) -> None:
        self.rng.choice(
            (self.add, self.add, self.link.post, self.link.post, self.land, self.cancel)
        )()
        self.link.queue.check_invariants()

    def add(self) -> None:
        extents: list[tuple[int, int, int]] = []
        for _ in range(self.rng.randrange(1, 6)):
            nbytes = self.rng.choice((1, 16, 64, 300))
            extents.append((self.base, self.base + 10_000_000, nbytes))
            self.base += nbytes + self.rng.choice((0, 8))
        part = (self.rng.choice((P, Q)), rows(*extents))
        operation = self.link.add(who(self.rng.randrange(4)), part)
        self.wanted[operation] = bytes_of(part[1])

    def land(self) -> None:
        if self.link.in_flight:
            at = self.rng.randrange(len(self.link.in_flight))
            failure = "reset" if self.rng.random() < 0.1 else None
            if failure:
                self.given_up |= set(self.link.in_flight[at].operations)
            self.link.land(at, failure)

    def cancel(self) -> None:
        if self.wanted:
            operation = self.rng.choice(list(self.wanted))
            self.given_up.add(operation)
            self.link.ends += self.link.queue.cancel(operation)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(4, 60))
def test_any_order_of_ends_reads_every_byte_once_and_ends_every_read_once(
    seed: int, num_steps: int
) -> None:
    draws = Draws(seed)
    for _ in range(num_steps):
        draws.step()
    link, wanted = draws.link, draws.wanted
    link.run()
    assert len(link.queue) == 0
    assert link.queue.in_flight_nbytes == 0
    assert sorted(end.operation for end in link.ends) == sorted(wanted), "each ends exactly once"
    posted = sum((bytes_of(quantum.extents) for quantum in link.posted), Counter[tuple[int, int]]())
    assert not posted or max(posted.values()) == 1, "a byte was read twice"
    for end in link.ends:
        if end.failure is None and not end.is_cancelled:
            assert wanted[end.operation] <= posted
            assert end.nbytes == wanted[end.operation].total()
        else:
            assert end.operation in draws.given_up


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 12))
def test_no_owner_waits_for_more_than_a_quantum_of_each_other(seed: int, num_owners: int) -> None:
    """Bounded wait, in quanta, with whatever sizes and however ends are ordered."""
    rng = random.Random(seed)
    link = Link(SMALL)
    owner_of: dict[OperationId, int] = {}
    for owner in range(num_owners):
        for _ in range(rng.randrange(1, 4)):
            nbytes = rng.choice((10, 64, 1000, 5000))
            owner_of[link.add(who(owner), (P, rows((0, 0, nbytes))))] = owner
    turns: list[int] = []
    waiting = Counter(owner_of.values())
    ended_at: dict[int, int] = {}
    while link.post() or link.in_flight:
        turns = [owner_of[quantum.operations[0]] for quantum in link.posted]
        before = len(link.ends)
        link.land(rng.randrange(len(link.in_flight)))
        for end in link.ends[before:]:
            waiting[owner_of[end.operation]] -= 1
            if waiting[owner_of[end.operation]] == 0:
                ended_at[owner_of[end.operation]] = len(turns)
    for owner in range(num_owners):
        own = [at for at, turn in enumerate(turns) if turn == owner]
        gaps = [later - earlier for earlier, later in itertools.pairwise(own)]
        assert max([own[0] + 1, *gaps]) <= num_owners
