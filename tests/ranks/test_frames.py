"""What ranks say to each other arrives whole, in order, or its loss is noticed within a bound."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from ranks.frames import FrameChannel, receive_frame, send_frame

LARGE = 3_000_000
"""More than a socket takes at once."""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    for side in (left, right):
        side.settimeout(30)
    yield left, right
    left.close()
    right.close()


@dataclass
class Listener:
    """One end on the loop, and what it was told."""

    messages: list[object] = field(default_factory=list)
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, message: object) -> None:
        self.messages.append(message)
        self.arrived.set()

    async def wait_for(self, count: int) -> list[object]:
        async with asyncio.timeout(30):
            while len(self.messages) < count:
                self.arrived.clear()
                await self.arrived.wait()
        return self.messages


def listen(sock: socket.socket) -> tuple[FrameChannel, Listener]:
    listener = Listener()
    return FrameChannel(sock, on_message=listener.take, on_lost=listener.lost.set), listener


def test_messages_of_any_size_arrive_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    sent = ["", "a", bytes(LARGE), {"x": (1, 2)}]
    sender = threading.Thread(target=lambda: [send_frame(left, each) for each in sent])
    sender.start()
    assert [receive_frame(right) for _ in sent] == sent
    sender.join()


def test_a_side_that_is_gone_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    left.sendall(b"\x05")  # and dies in the middle of a header
    left.close()
    with pytest.raises(ConnectionError):
        receive_frame(right)
    with pytest.raises(OSError, match="pipe"):
        send_frame(right, "x")


def test_a_side_that_is_frozen_is_an_error_within_the_bound(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    for side in pair:
        side.settimeout(0.05)
    with pytest.raises(TimeoutError):
        receive_frame(pair[0])
    with pytest.raises(TimeoutError):
        send_frame(pair[0], bytes(LARGE))


async def test_the_loop_never_waits_for_a_side_that_does_not_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left, right = pair
    channel, _ = listen(left)
    sent: list[object] = [bytes(LARGE), *range(50), bytes(LARGE)]
    for each in sent:
        channel.send(each)  # returns, though nobody reads
    received = await asyncio.to_thread(lambda: [receive_frame(right) for _ in sent])
    assert received == sent
    channel.close()


async def test_two_loops_exchange_messages_whole(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    (left, heard_left), (right, heard_right) = listen(pair[0]), listen(pair[1])
    for each in (1, bytes(LARGE), 2):
        left.send(each)
        right.send(each)
    assert await heard_right.wait_for(3) == [1, bytes(LARGE), 2]
    assert await heard_left.wait_for(3) == [1, bytes(LARGE), 2]
    left.close()
    right.close()


async def test_a_loss_is_told_once_and_behind_all_that_came_before(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    channel, heard = listen(pair[0])
    send_frame(pair[1], "last words")
    pair[1].close()
    async with asyncio.timeout(30):
        await heard.lost.wait()
    assert heard.messages == ["last words"]
    channel.send("to nobody")
    channel.close()


async def test_nothing_is_told_after_closing(pair: tuple[socket.socket, socket.socket]) -> None:
    channel, heard = listen(pair[0])
    send_frame(pair[1], "too late")
    channel.close()
    pair[1].close()
    await asyncio.sleep(0.01)
    assert not heard.messages
    assert not heard.lost.is_set()


async def test_a_message_that_cannot_be_taken_strands_none_behind_it(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    listener = Listener()

    def take(message: object) -> None:
        listener.take(message)
        if message == 1:
            raise ValueError(message)

    channel = FrameChannel(pair[0], on_message=take, on_lost=listener.lost.set)
    for each in range(3):
        send_frame(pair[1], each)
    assert await listener.wait_for(3) == [0, 1, 2]
    assert len(errors) == 1
    channel.close()
