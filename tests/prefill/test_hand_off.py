"""What a source has promised, when the work behind it is interrupted or nothing else happens."""

from blockmgr.states import BlockState
from core.ids import Attempt, Incarnation, Owner, RequestId
from core.messages import PieceId, Released
from prefill.offers import SettledChunk
from tests.prefill.bench import Bench
from transfer.tickets import Offer, TicketBook

ME = Incarnation("P")


def issue(book: TicketBook, chunk: SettledChunk, now: float) -> bool:
    """Issue the ticket for ``chunk``; return whether somebody wants it."""
    offer = Offer(
        piece=PieceId(
            first_layer=chunk.first_layer, last_layer=chunk.last_layer, chunk=chunk.chunk
        ),
        blocks=chunk.blocks,
        num_tokens=chunk.num_tokens,
        last=chunk.is_last,
        first_token=chunk.first_token,
    )
    return book.issue(chunk.prompt.owner, offer, now) is not None


def names_only_its_own(bench: Bench, chunk: SettledChunk) -> bool:
    """Whether every block of ``chunk`` is its owner's now, in the life that is named."""
    for named in chunk.blocks:
        table = bench.blocks.block_tables(chunk.prompt.owner)[named.group]
        at = slice(named.first_index, named.first_index + len(named.block_ids))
        if tuple(table[at].tolist()) != named.block_ids:
            return False
        if tuple(map(bench.blocks.generation, named.block_ids)) != named.generations:
            return False
    return True


def test_d10_interrupted_prompt_hands_off_nothing_and_a_new_attempt_anew() -> None:
    # Given a prompt whose first chunk is on the device
    bench = Bench(10)
    bench.add("R", 64)
    first = bench.scheduler.schedule()
    assert first is not None
    # When it loses its blocks, another takes the memory, and it comes back as a new attempt
    bench.scheduler.cancel((RequestId("R"), Attempt(1)))
    bench.add("other", 64, salt=1000)
    other = bench.scheduler.schedule()
    assert other is not None
    again = bench.add("R", 64, attempt=2)
    # Then the stale output of the first attempt is dropped
    assert bench.complete(first) == []
    # And every hand-off names blocks that its owner has, in their present life
    chunks = bench.complete(other)
    assert all(names_only_its_own(bench, chunk) for chunk in chunks)
    while (batch := bench.scheduler.schedule()) is not None:
        for chunk in bench.complete(batch):
            assert names_only_its_own(bench, chunk)
            chunks.append(chunk)
    assert [c.chunk for c in chunks if c.prompt.owner == again] == [0, 1]
    bench.scheduler.check_invariants()


def hand_off(bench: Bench, book: TicketBook, name: str) -> Owner:
    owner = bench.add(name, 40)
    assert book.open(owner, reader="D")
    for chunk in bench.run():
        assert issue(book, chunk, now=100.0)
    return owner


def test_d12_an_idle_source_frees_at_an_acknowledgement() -> None:
    bench, book = Bench(10), TicketBook(ME, lease_s=30.0)
    owner = hand_off(bench, book, "R")
    assert bench.blocks.counts()[BlockState.LEASED] == 3
    # When the reader has all, and nothing else happens
    freed = book.released(Released(*owner, ME))
    assert freed == owner
    bench.blocks.release(owner)
    # Then nothing is withheld, without another step or request
    assert bench.blocks.num_allocatable == 10
    assert book.next_deadline() is None


def test_d12_an_idle_source_frees_at_the_end_of_a_lease() -> None:
    bench, book = Bench(10), TicketBook(ME, lease_s=30.0)
    owner = hand_off(bench, book, "R")
    # Given a worker that sleeps until the book's next deadline, and nothing else
    deadline = book.next_deadline()
    assert deadline == 130.0
    assert book.expire(deadline) == [owner]
    bench.blocks.release(owner)
    assert bench.blocks.num_allocatable == 10
    assert bench.scheduler.schedule() is None
