"""Why a prefill worker failed is passed on to the router, which reads every word of this worker.

A reason that is longer than a message may have would make the whole message unreadable, and a
channel that brings something unreadable is lost: with it every request that is served over it.
"""

from core.bounds import MAX_EXPLANATION
from core.ids import Attempt, RequestId, WorkerId
from core.messages import Failed, decode, encode
from decode.delivery import Loss
from tests.decode.test_requests import ONE, PEER, Side


async def test_a_reason_of_any_length_is_told_as_far_as_a_message_goes() -> None:
    side = Side(load_failure="fail")
    side.take(ONE, "a", prefill=PEER)
    # Given the longest reason that prefill can give, and what is said before it
    reason = "prefill failed: " + "x" * MAX_EXPLANATION
    side.requests.lose(Loss((RequestId("a"), Attempt(1)), reason, "transfer", WorkerId("P")))
    ((_, message),) = side.sent.messages
    # Then its router can read what it is told
    told = decode(encode(message))
    assert isinstance(told, Failed)
    assert told.reason == reason[:MAX_EXPLANATION]
