"""Who may pass whom in the queue of prompts.

Decode keeps memory for the rest of a prompt whose first tokens it has pinned. If a younger prompt
passed that one here, it could wait on decode for that memory, with blocks here that the older one
needs: neither would go on.
"""

from core.config import SchedulerConfig
from core.ids import Attempt, OperationId, Owner, RequestId
from core.kv_layout import KVGroup, KVLayout
from core.messages import Prefill
from core.sampling import SamplingParams
from engine.batch import StepBatch
from prefill.scheduler import PrefillScheduler
from tests.property.virtual_tiers import make_blocks

LAYOUT = KVLayout((KVGroup(layers=(0,)),), 16, num_kv_heads=1, head_dim=4, dtype="float32")


class Side:
    """A prefill scheduler with a storage tier that answers when the test says so."""

    def __init__(self) -> None:
        self.blocks, self.tiers = make_blocks(LAYOUT, 10, fences=True, name="P", num_slots=20)
        self.scheduler = PrefillScheduler(
            self.blocks, LAYOUT, SchedulerConfig(), fingerprint="test", tiers=self.tiers
        )

    def add(self, name: str, *, first_token: int, salt: int) -> Owner:
        owner = (RequestId(name), Attempt(1))
        self.scheduler.add(
            Prefill(
                request_id=owner[0],
                attempt=owner[1],
                prompt_token_ids=tuple(range(salt, salt + 100)),
                sampling=SamplingParams(seed=1, max_tokens=5),
                first_token=first_token,
            )
        )
        return owner

    def finds(self) -> list[OperationId]:
        """Return the look-ups that were begun since the last call, in order."""
        assert self.tiers is not None
        return [action.operation for action in self.tiers.take_actions()]

    def miss(self, find: OperationId) -> None:
        """Storage has nothing, or did not answer in time."""
        assert self.tiers is not None
        self.tiers.found(find, 0)

    def first(self) -> tuple[Owner, StepBatch]:
        """Return who was admitted, alone, since the pool holds one of them."""
        batch = self.scheduler.schedule()
        assert batch is not None
        (owner,) = self.blocks.owners
        return owner, batch


def test_c17_a_prompt_whose_prefix_the_reader_has_pinned_is_passed_by_nobody() -> None:
    side = Side()
    pinned = side.add("pinned", first_token=16, salt=0)
    side.add("younger", first_token=0, salt=1000)
    first, second = side.finds()

    # Not even while storage is asked for it, which ends in any case
    side.miss(second)
    assert side.scheduler.schedule() is None
    side.miss(first)
    owner, _ = side.first()
    assert owner == pinned


def test_a_prompt_that_storage_is_asked_for_is_passed() -> None:
    side = Side()
    side.add("fetching", first_token=0, salt=0)
    pinned = side.add("pinned", first_token=16, salt=1000)
    side.miss(side.finds()[1])
    owner, _ = side.first()
    assert owner == pinned
