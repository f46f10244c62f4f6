"""What a reconciler remembers of one service, and when one that has died is started anew. Pure."""

from dataclasses import dataclass

from core.messages import Party
from deploy.supervision.desired import State

FIRST_WAIT_S = 1.0
"""Before the second restart in a row; doubled for each further one."""


@dataclass(slots=True)
class Member:
    """One service, as it was seen last."""

    role: Party
    revision: str
    state: State
    in_state_since: float
    deaths: int = 0
    """In a row."""
    is_leaving: bool = False
    leaving_since: float = 0.0
    is_given_up: bool = False
    condemned_at: float | None = None
    """When its kill was last told."""
    retry_at: float | None = None
    served_by: str | None = None
    """The revision by which it was ready last."""

    @property
    def is_up(self) -> bool:
        """Whether its process is there, or will be as soon as there is room."""
        return self.state in {"pending", "adopted", "starting", "ready", "draining"}

    @property
    def may_pass(self) -> bool:
        """Whether what refuses its start, such as a taken port, did not refuse one before."""
        return self.state != "ready" and self.served_by == self.revision

    @property
    def serves(self) -> bool:
        """As far as is known; whose kill was told serves no longer."""
        return self.state == "ready" and self.condemned_at is None


def backoff_s(deaths: int, max_s: float) -> float:
    """Return the wait before the restart after the ``deaths``-th death in a row, the first is 1."""
    if deaths <= 1:
        return 0.0
    return min(FIRST_WAIT_S * 2.0 ** min(deaths - 2, 30), max_s)
