"""Reads of one request that end differently, in every order of events, in bytes.

R is received in two pieces. Either read can land, fail, or be on its way when the client leaves;
meanwhile N waits for R's memory and is received into it. Whatever the order: R is trusted only if
both pieces landed, and N never finds a byte of R's reads. With a guard off, the same adversary must
find a schedule that breaks this.
"""

import random
from collections.abc import Callable, Sequence

import pytest

from blockmgr.states import BlockState
from core.ids import OperationId, Owner
from core.messages import PieceId
from tests.interleaving import every_schedule
from tests.transfer.adversary import Network, Write
from tests.transfer.two_sides import DecodeSide, PrefillSide, layout, owner
from transfer.actions import Action, OperationTerminal
from transfer.reader import Reader
from transfer.receiving import Receiving

R, N = owner("r"), owner("n")
FIRST, SECOND = OperationId(1), OperationId(2)


class PartialFailure:
    """R's reads on a slow network, and N behind R, from another source."""

    def __init__(self, *, reader: type[Reader] = Reader, ends: Sequence[str] = ()) -> None:
        network = Network()
        self.source = PrefillSide(network, layout(), "P1")
        self.other = PrefillSide(network, layout(), "P2")
        self.decode = DecodeSide(
            network, layout(), num_blocks=4, reader=reader, rng=random.Random(1)
        )
        self.ends = ends
        self.done: list[str] = []
        for source in (self.source, self.other):
            self.decode.pair(source)
        self.decode.request(R, self.source)
        for chunk in (0, 1):
            self.decode.ticket(
                self.source.compute(
                    R,
                    self.decode.now,
                    first_index=2 * chunk,
                    num_blocks=2,
                    piece=PieceId(0, 1, chunk),
                    last=chunk == 1,
                )
            )
        self.decode.request(N, self.other)
        self.decode.ticket(self.other.compute(N, self.decode.now, num_blocks=4))
        assert self.decode.count(BlockState.RECEIVING) == 4

    def actions(self) -> dict[str, Callable[[], None]]:
        """What the adversary may do next."""
        found: dict[str, Callable[[], None]] = {}
        for name, operation in (("first", FIRST), ("second", SECOND)):
            if self._writes(operation):
                found[f"{name} lands"] = lambda at=operation: self._land(at)
                if f"{name} fails" in self.ends:
                    found[f"{name} fails"] = lambda at=operation: self._fail(at)
        if self.decode.nic.pending.keys() - {write.read for write in self.decode.nic.writes}:
            found["poll"] = self.decode.poll
        if "leave" in self.ends and "leave" not in self.done and self.decode.blocks.holds(R):
            found["leave"] = lambda: self.decode.cancel(R)
        if not self.decode.blocks.holds(R) and self._can_allocate():
            found["N reads"] = self.decode.retry
        if self._writes_of(N):
            found["N lands"] = self._land_n
        if R in self.decode.delivered and self.decode.blocks.holds(R):
            found["R ends"] = lambda: self.decode.forget(R)
        return found

    def check(self) -> None:
        """Assert what must hold at the end of every schedule."""
        self.decode.check()
        assert N in self.decode.delivered, self.done
        assert self.is_intact(), self.done
        assert (R in self.decode.delivered) <= {"first lands", "second lands"}.issubset(self.done)
        self.decode.forget(N)
        assert self.decode.num_free == 4, self.done

    def is_intact(self) -> bool:
        """Whether N finds its own bytes, after everything that may still be written was."""
        for write in [*self.decode.nic.writes]:
            write.land()
        return N not in self.decode.delivered or self.decode.wrong_positions(N) == []

    def _can_allocate(self) -> bool:
        waits = any(who == N for who, _ in self.decode.reader.unallocated())
        return waits and self.decode.num_free == 4

    def _writes(self, operation: OperationId) -> list[Write]:
        reads = [at for at, of in self.decode.operation_of_read.items() if of == operation]
        return [write for write in self.decode.nic.writes if write.read in reads]

    def _writes_of(self, who: Owner) -> list[Write]:
        source = self.other if who == N else self.source
        return [w for w in self.decode.nic.writes if w.peer == source.incarnation]

    def _land(self, operation: OperationId) -> None:
        for write in self._writes(operation):
            self.decode.nic.writes.remove(write)
            write.land()

    def _land_n(self) -> None:
        for write in self._writes_of(N):
            self.decode.nic.writes.remove(write)
            write.land()

    def _fail(self, operation: OperationId) -> None:
        """The network gives one read up, flushed; its sibling is still on its way."""
        for write in self._writes(operation):
            self.decode.nic.writes.remove(write)
        reads = [at for at, of in self.decode.operation_of_read.items() if of == operation]
        for read in reads:
            del self.decode.nic.pending[read]
        self.decode.carry_out(self.decode.reader.read_failed(operation, "ERR", self.decode.now))


def play(make: Callable[[], PartialFailure]) -> list[PartialFailure]:
    return list(every_schedule(make))


@pytest.mark.parametrize(
    "ends",
    [("leave",), ("first fails",), ("second fails",), ("leave", "first fails", "second fails")],
)
def test_c07_c21_c24_partial_ends_harm_nobody_in_any_order(ends: tuple[str, ...]) -> None:
    races = play(lambda: PartialFailure(ends=ends))

    assert len(races) > 5
    for race in races:
        race.check()
    if ends == ("leave",):
        outcomes = {R in race.decode.delivered for race in races}
        assert outcomes == {True, False}, "the adversary never reached one of the ends"


class CancelIsTerminal(Reader):
    """The guard switched off: what is cancelled counts as over."""

    def cancel(self, owner: Owner, now: float) -> list[Action]:
        entry = self._requests.get(owner)
        operations = [] if entry is None else [p.operation for p in entry.pieces.values()]
        actions = super().cancel(owner, now)
        ended = [
            OperationTerminal(operation)
            for operation in operations
            if operation is not None and self._endpoints._operations.end(operation) is not None
        ]
        return [*actions, *ended]


def test_c21_the_adversary_wins_where_a_cancelled_read_counts_as_over() -> None:
    def make() -> PartialFailure:
        return PartialFailure(reader=CancelIsTerminal, ends=("leave",))

    races = [race for race in play(make) if N in race.decode.delivered]

    assert any(not race.is_intact() for race in races)


def test_c24_the_adversary_wins_where_pieces_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_piece(entry: Receiving) -> bool:
        return entry.last_chunk is not None and any(True for _ in entry.landed())

    monkeypatch.setattr(Receiving, "is_complete", any_piece)
    race = PartialFailure()
    race._land(SECOND)
    race.decode.poll()

    assert R in race.decode.delivered
    assert race.decode.wrong_positions(R) != []


def test_c07_the_adversary_wins_where_a_failed_read_ends_its_siblings_too() -> None:
    """Without the teardown that proves it, the sibling lands in N's memory."""

    class Untorn(PartialFailure):
        def _fail(self, operation: OperationId) -> None:
            tear_down = self.decode.nic.tear_down
            self.decode.nic.tear_down = lambda peer: [  # type: ignore[method-assign]
                read for read, (at, _) in self.decode.nic.pending.items() if at == peer
            ]
            super()._fail(operation)
            self.decode.nic.tear_down = tear_down  # type: ignore[method-assign]

    races = play(lambda: Untorn(ends=("first fails",)))

    assert any(not race.is_intact() for race in races)


def test_c07_late_completion_of_the_sibling_is_counted_and_harms_nobody() -> None:
    race = PartialFailure()
    race._fail(FIRST)
    assert R in race.decode.failed
    assert race.decode.num_free == 4  # the teardown ended the sibling

    race.decode.carry_out(race.decode.reader.landed(SECOND, race.decode.now))

    assert race.decode.reader.stats.stale["outcome"] == 1
    race.decode.retry()
    race._land_n()
    race.decode.poll()
    race.check()


def test_one_read_that_fails_ends_the_request_and_what_others_have_brought() -> None:
    """Two pieces: what one has brought is worth nothing without the other."""
    network = Network()
    source = PrefillSide(network, layout())
    decode = DecodeSide(network, layout())
    decode.pair(source)
    decode.request(R, source)
    for layer in (0, 1):
        piece = PieceId(layer, layer, 0)
        ticket = source.compute(R, decode.now, first_index=2 * layer, num_blocks=2, piece=piece)
        decode.ticket(ticket)
    landing = [write for write in decode.nic.writes if write.read == 1]
    for write in landing:
        decode.nic.writes.remove(write)
        write.land()
    decode.poll()
    decode.nic.kill(source.incarnation)
    decode.poll()

    assert list(decode.failed) == [R]
    assert decode.delivered == {}
    assert decode.num_free == 10
    decode.check()


def test_c09_failure_of_one_group_fails_the_request() -> None:
    network = Network()
    kv = layout(num_groups=2)
    source = PrefillSide(network, kv)
    decode = DecodeSide(network, kv, num_blocks=12)
    decode.pair(source)
    decode.request(R, source)
    ticket = source.compute(R, decode.now, num_blocks=3)
    assert {run.group for run in ticket.blocks} == {0, 1}
    decode.ticket(ticket)
    of_first_group = list(decode.nic.writes)[:2]
    for write in of_first_group:
        decode.nic.writes.remove(write)
        write.land()
    decode.poll()
    decode.nic.kill(source.incarnation)
    decode.poll()

    assert list(decode.failed) == [R]
    assert decode.failed[R].is_retryable
    assert decode.delivered == {}
    assert decode.num_free == 12
    decode.check()
