"""A worker's reports to every router of its fleet: one link for each address of a host name."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from core.errors import HandshakeError
from core.router_link import Reporter, RouterLink

log = logging.getLogger(__name__)

LOOK_UP_INTERVAL_S = 3.0
LOOK_UP_TIMEOUT_S = 5.0
REFUSED_WAIT_S = 15.0
"""Before a router that has refused this worker is asked again: its address may become another's."""

LookUp = Callable[[str, int], Awaitable[frozenset[str]]]
"""From host and port to the ``tcp://IP:PORT`` of each address; an OSError: it is not known now."""


class RouterLinks:
    """Reports to all routers at once. The name is looked up again, so replicas may come and go.

    An address that the name has lost keeps its link while the router there takes the reports: a
    name server that answers with part of its list cuts no router off. A router that refuses this
    worker, such as one of a later version while they are replaced, leaves it to the others.
    """

    def __init__(self, address: str, reporter: Reporter, look_up: LookUp | None = None) -> None:
        """Report to ``tcp://HOST:PORT``."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._reporter = reporter
        self._look_up = look_up or addresses_of
        self._links: dict[str, RouterLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, float] = {}
        """When to ask again, by the address of who refused."""

    @property
    def is_connected(self) -> bool:
        """Whether a router has taken this worker; any thread may ask."""
        return any(link.is_connected for link in list(self._links.values()))

    async def run(self) -> None:
        """Report until cancelled.

        Raises:
            HandshakeError: every router has refused this worker; another try does not help.
        """
        try:
            while True:
                self._keep(await self._addresses())
                await self._rest()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _rest(self) -> None:
        """Wait until it is time to look again, or until a link has ended."""
        if not self._tasks:
            await asyncio.sleep(LOOK_UP_INTERVAL_S)
            return
        ended, _ = await asyncio.wait(
            self._tasks.values(),
            timeout=LOOK_UP_INTERVAL_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for address in [address for address, task in self._tasks.items() if task in ended]:
            self._end(address)

    def _end(self, address: str) -> None:
        """Forget a link that has ended, unless that is the failure of all."""
        task = self._tasks.pop(address)
        del self._links[address]
        try:
            task.result()
        except HandshakeError as error:
            if not self._links:
                raise
            if address not in self._refused:
                log.error("event=refused router=%s reason=%s", address, error)  # noqa: TRY400
            self._refused[address] = asyncio.get_running_loop().time() + REFUSED_WAIT_S

    async def _addresses(self) -> frozenset[str]:
        try:
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                return await self._look_up(self._host, self._port)
        except (OSError, TimeoutError) as error:
            log.warning("event=no_address router=%s reason=%s", self._host, error or "no answer")
            return frozenset(self._links)

    def _keep(self, addresses: frozenset[str]) -> None:
        for address in self._refused.keys() - addresses:
            del self._refused[address]
        now = asyncio.get_running_loop().time()
        waiting = {address for address, again_at in self._refused.items() if now < again_at}
        for address in addresses - self._links.keys() - waiting:
            link = self._links[address] = RouterLink(address, self._reporter)
            self._tasks[address] = asyncio.create_task(link.run())
        for address in self._links.keys() - addresses:
            if not self._links[address].is_connected:
                del self._links[address]
                self._tasks.pop(address).cancel()


async def addresses_of(host: str, port: int) -> frozenset[str]:
    """Return ``tcp://IP:PORT`` for each address of ``host``.

    Raises:
        OSError: the name is not known, or nobody answers who would know.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = {str(sockaddr[0]) for *_, sockaddr in found}
    return frozenset(f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}" for ip in hosts)
