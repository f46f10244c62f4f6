"""What becomes of a request whose KV does not come from prefill."""

from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter

from decode.delivery import Loss

Policy: TypeAlias = Literal["recompute", "fail"]


class LoadFailures:
    """Decides by the configured policy, and counts."""

    def __init__(self, policy: Policy, registry: CollectorRegistry) -> None:
        self._policy: Policy = policy
        counter = Counter(
            "sluice_kv_load_failures",
            "Requests whose KV did not come from prefill, by what was done with them",
            ("policy",),
            registry=registry,
        )
        self._counts = {each: counter.labels(each) for each in ("recompute", "fail")}

    def is_recomputed(self, loss: Loss) -> bool:
        """Whether the request is to be computed here; otherwise this attempt of it has failed.

        Not where an invariant of ours broke, which is no peer's doing: then nothing here is to be
        trusted with the request.
        """
        is_of_peer = loss.kind == "transfer" or loss.peer is not None
        policy: Policy = self._policy if is_of_peer else "fail"
        self._counts[policy].inc()
        return policy == "recompute"
