"""One sequence that the router has not done with, and where it runs."""

import asyncio
from dataclasses import dataclass, field

from core.ids import Owner
from core.messages import Abort, Generate, PrefillPeer
from router.generation import Generation
from router.links import DecodeLink
from router.policy import Route
from router.request_life import RequestLife
from router.request_phase import ON_WORKER
from router.sequence import Sequence


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A sequence's life, its text, and the link to the worker that its attempt is on."""

    generation: Generation
    index: int
    """Of the sequence in its generation."""
    life: RequestLife
    link: DecodeLink | None = None
    """Of the newest attempt."""
    moved_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no worker has the sequence."""

    @property
    def sequence(self) -> Sequence:
        """The text and its tokens."""
        return self.generation.sequences[self.index]

    @property
    def owner(self) -> Owner:
        """Whose the newest attempt is."""
        return self.sequence.spec.request_id, self.life.attempt

    @property
    def is_on_worker(self) -> bool:
        """Whether a worker has, or may have, the sequence."""
        return self.life.phase in ON_WORKER

    def dispatch(self) -> Route:
        """Send what starts the attempt: it goes on after the tokens of earlier ones."""
        route = self.life.route
        assert route is not None, "it was placed"
        assert self.link is not None, "a link was chosen with the route"
        self.moved_on.clear()
        spec = self.sequence.spec
        prefill = route.prefill
        self.link.send(
            Generate(
                request_id=spec.request_id,
                attempt=self.life.attempt,
                prompt_token_ids=spec.prompt_token_ids,
                sampling=spec.sampling,
                output_token_ids=tuple(self.sequence.token_ids),
                prefill=None
                if prefill is None
                else PrefillPeer(prefill.worker_id, prefill.incarnation, prefill.heartbeat.address),
                cache_salt=spec.cache_salt,
            )
        )
        return route

    def abort(self) -> None:
        """Tell the worker of the newest attempt to end it."""
        assert self.link is not None, "only what was dispatched is aborted"
        self.link.send(Abort(*self.owner))
