"""Who has asked for which prompt, and what a reader's word, silence or lease ends."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from core.channel import ClientId
from core.deadlines import keep_deadlines
from core.errors import OverloadedError
from core.ids import Incarnation, Owner
from core.messages import AnyMessage, Prefill, PrefillFailed, Released, Renew, Ticket, Withdraw
from prefill.tracing import PrefillTrace
from transfer.tickets import Offer, TicketBook

log = logging.getLogger(__name__)


class Replies(Protocol):
    """Takes what is said to readers."""

    def send(self, client: ClientId, message: AnyMessage) -> None:
        """Send ``message``; nothing is done where ``client`` is lost."""
        ...


@dataclass(frozen=True, slots=True)
class _Asked:
    client: ClientId
    arrived_at: float


class Readers:
    """Carries out, for all readers, what the ticket book decides. Belongs to one event loop.

    Each owner that was opened is given to ``free`` exactly once, unless it was refused.
    """

    def __init__(
        self,
        book: TicketBook,
        replies: Replies,
        trace: PrefillTrace,
        *,
        incarnation: Incarnation,
        max_requests: int,
        free: Callable[[Owner], None],
    ) -> None:
        """Begin without readers.

        Args:
            book: Decides.
            replies: Leads to the readers.
            trace: Of each request.
            incarnation: Of this process.
            max_requests: Of one reader at once.
            free: Told of an owner whose blocks nobody will read any more.
        """
        self._book = book
        self._replies = replies
        self._trace = trace
        self._incarnation = incarnation
        self._max_requests = max_requests
        self._free = free
        self._asked: dict[Owner, _Asked] = {}
        self._clock = asyncio.get_running_loop().time
        self._lease_may_be_new = asyncio.Event()

    def open(self, client: ClientId, request: Prefill) -> bool:
        """``client`` asks for a prompt; return whether it is new and to be computed."""
        owner = (request.request_id, request.attempt)
        if not self._book.open(owner, reader=client.hex()):
            log.warning("dropped=Prefill request=%s attempt=%d reason=stale", *owner)
            return False
        self._asked[owner] = _Asked(client, self._clock())
        return True

    def check_load(self, client: ClientId) -> None:
        """Check that ``client`` has asked for no more than routers let it have at once.

        Raises:
            OverloadedError: with the last one it has.
        """
        count = sum(asked.client == client for asked in self._asked.values())
        if count > self._max_requests:
            raise OverloadedError(
                f"this decode worker has {count - 1} requests here already, twice "
                f"router.max_pending_requests={self._max_requests // 2} are taken; give router and "
                "prefill one value of it, or add prefill workers"
            )

    @property
    def num_owners(self) -> int:
        """Requests of all readers that are neither released, withdrawn nor expired."""
        return len(self._asked)

    def refuse(self, owner: Owner, reason: str) -> None:
        """Tell the reader that ``owner``, just opened, is not computed here."""
        self._book.revoke(owner)
        self._trace.failed(owner, reason)
        self._replies.send(
            self._asked.pop(owner).client,
            PrefillFailed(
                request_id=owner[0],
                attempt=owner[1],
                incarnation=self._incarnation,
                reason=reason,
                retryable=True,
            ),
        )

    def waited_s(self, owner: Owner) -> float:
        """Return how long ago ``owner`` was asked for."""
        return self._clock() - self._asked[owner].arrived_at

    def offer(self, owner: Owner, offer: Offer) -> Ticket | None:
        """Send the ticket for ``offer`` and return it; None where nobody wants it any more."""
        ticket = self._book.issue(owner, offer, self._clock())
        if ticket is not None:
            self._trace.offered(ticket)
            self._replies.send(self._asked[owner].client, ticket)
            self._lease_may_be_new.set()
        return ticket

    def renew(self, client: ClientId, message: Renew) -> None:
        """``client`` still reads; it is told what is void."""
        renewed = self._book.renew(message, self._clock(), reader=client.hex())
        self._replies.send(client, renewed)
        self._lease_may_be_new.set()

    def end(self, client: ClientId, message: Released | Withdraw) -> None:
        """``client`` has all, or wants no more."""
        if isinstance(message, Withdraw):
            owner, how = self._book.withdraw(message, reader=client.hex()), "withdrawn"
        else:
            owner, how = self._book.released(message, reader=client.hex()), "released"
        if owner is not None:
            self._trace.ended(owner, how)
            self._forget(owner)

    def lose(self, client: ClientId) -> None:
        """What a lost reader was offered nothing of ends now; its leases run to their end.

        It may be cut off and still reading: the lease, not the silence, decides.
        """
        for owner in self._book.reader_lost(client.hex()):
            self._trace.failed(owner, "the reader was lost before its first ticket")
            self._forget(owner)

    async def run(self) -> None:
        """Free what nobody renewed, whether or not anything else happens, until cancelled."""
        await keep_deadlines(self._book.next_deadline, self._lease_may_be_new, self._expire)

    def _expire(self, now: float) -> None:
        for owner in self._book.expire(now):
            log.warning("event=lease_expired request=%s attempt=%d", *owner)
            self._trace.ended(owner, "expired")
            self._forget(owner)

    def _forget(self, owner: Owner) -> None:
        del self._asked[owner]
        self._free(owner)
