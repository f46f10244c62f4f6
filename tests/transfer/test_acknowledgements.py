"""A source must hear how a request ended, however early the reader has forgotten it."""

from core.ids import Generation
from core.messages import GroupBlocks, Reading, Released, Ticket, Withdraw
from tests.transfer.adversary import Network
from tests.transfer.conftest import MakeDecode
from tests.transfer.two_sides import DecodeSide, PrefillSide, layout, owner, with_blocks
from transfer.actions import Action
from transfer.reader import Reader

R, S = owner("r"), owner("s")


def test_i04_a_request_forgotten_before_its_messages_leave_is_still_acknowledged(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    # Given R whose last byte has landed
    decode.request(R, prefill)
    decode.ticket(prefill.compute(R, decode.now, num_blocks=3))
    decode.land_all()
    # When it ends and nothing of it is left here, before any message has left
    decode.forget(R)
    assert not decode.reader.is_receiving(R)
    assert prefill.book.num_leased == 1
    # Then the source still hears that it may free
    decode.exchange()
    assert Released(*R, prefill.incarnation) in decode.sent
    assert len(prefill.free) == 64


def test_i04_every_source_hears_of_reads_that_outlive_their_request(
    network: Network, make_decode: MakeDecode
) -> None:
    # Given two requests, each read from a source of its own
    decode = make_decode()
    sources = [PrefillSide(network, layout(), name) for name in ("P1", "P2")]
    for who, source in zip((R, S), sources, strict=True):
        decode.pair(source)
        decode.request(who, source)
        decode.ticket(source.compute(who, decode.now, num_blocks=2))
    decode.exchange()
    assert all(source.is_reading for source in sources)
    # When both are cancelled, and so forgotten, while their reads go on
    for who in (R, S):
        decode.cancel(who)
    decode.exchange()
    assert {Withdraw(*R), Withdraw(*S)} <= {m for m in decode.sent if isinstance(m, Withdraw)}
    assert all(source.is_reading for source in sources), "the reads are not over"
    # Then each source is told when its own are over
    decode.land_all()
    decode.exchange()
    assert decode.sent.count(Reading(active=False)) == 2
    assert not any(source.is_reading for source in sources)
    assert all(len(source.free) == 64 for source in sources)


class IgnoresGenerations(Reader):
    """The guard switched off: a block is a block, whatever has become of it since."""

    def ticket(self, message: Ticket, now: float) -> list[Action]:
        blocks = [
            GroupBlocks(
                run.group, run.first_index, run.block_ids, tuple(map(_any, run.generations))
            )
            for run in message.blocks
        ]
        return super().ticket(with_blocks(message, blocks), now)


def _any(generation: Generation) -> Generation:
    del generation
    return Generation(0)


def offer_again_in_another_life(decode: DecodeSide, source: PrefillSide) -> None:
    """The source loses the blocks of R's ticket, and offers the same ids anew."""
    decode.request(R, source)
    ticket = source.compute(R, decode.now, num_blocks=3)
    decode.ticket(ticket)
    source.pool.rows[source.held[R]] = 0xEE
    (run,) = ticket.blocks
    later = GroupBlocks(0, 0, run.block_ids, tuple(Generation(2) for _ in run.generations))
    decode.ticket(with_blocks(ticket, [later]))
    decode.land_all()


def test_j03_with_generations_a_block_in_another_life_is_not_trusted(
    decode: DecodeSide, prefill: PrefillSide
) -> None:
    offer_again_in_another_life(decode, prefill)
    assert R in decode.failed
    assert R not in decode.delivered


def test_j03_without_the_generation_check_another_life_is_trusted(
    make_decode: MakeDecode, prefill: PrefillSide
) -> None:
    decode = make_decode(reader=IgnoresGenerations)
    decode.pair(prefill)
    offer_again_in_another_life(decode, prefill)
    assert R in decode.delivered
    assert decode.wrong_positions(R) != []
