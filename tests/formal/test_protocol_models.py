"""Fences, tickets, leases and tear-downs, searched exhaustively; and each guard shown to matter.

J02, J03, J05: a model in which a guard can be missing without harm proves nothing of that guard, so
every guard is taken away once, and the search must find the very property that it upholds broken.
What is modelled, and which line of the code each action stands for, is in docs/formal-model.md.
"""

from pathlib import Path

import pytest

from tests.formal.spin_search import MISSING, Kind, search

Options = tuple[str, ...]


def named(case: object) -> str | None:
    """Return how a test is named for one of its arguments."""
    return " ".join(map(str, case)) or "default" if isinstance(case, tuple) else None


pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

FENCES, LEASES = "pool_fences.pml", "ticket_lease.pml"
IMMEDIATE = ("NO_STEP_FENCE", "LOOSE")
ONE_PIECE = ("END=2", "LEASE=1", "NUM_RENEWALS=1")
TWO_PIECES = ("NC=2", "END=1", "LEASE=1", "NUM_RENEWALS=1", "NUM_TROUBLES=1")

# Properties, by what spin shows of the assertion.
STALE_WRITE = "assertion violated  !(((owner[b]==0)"
SPOILT = "(valid&(1<<b))"
COUNTED_BELOW_ZERO = "in_flight[i]>0"
UNHELD_BYTES = "good&(1<<c)"
TAKEN_BLOCK = "holder[x]"
RELEASED_TWICE = "entry[a]!=0"
TOO_MUCH_QUARANTINE = "is_quarantined[0]+is_quarantined[1]"
REQUEST_STUCK = "decode_is_dead|| !((state!=0))"
LEASE_STUCK = "prefill_is_dead||"
NEVER_ENDS = "acceptance cycle"


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (FENCES, ()),
        (FENCES, ("DEPTH=1",)),
        (FENCES, ("DEPTH=1", "READ_BLOCKS=1")),
        (FENCES, ("NB=2", "READ_BLOCKS=1")),
        (LEASES, ONE_PIECE),
        (LEASES, TWO_PIECES),
    ],
    ids=named,
)
def test_j02_no_live_block_is_written_by_a_stale_writer(
    tmp_path: Path, model: str, options: Options
) -> None:
    verdict = search(tmp_path, model, *options)
    assert verdict.num_errors == 0, verdict.error
    assert verdict.is_complete


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (FENCES, ("READ_BLOCKS=1",)),
        (FENCES, ("NO_READS", "DEVICE_IN_ORDER", *IMMEDIATE)),
        (LEASES, ("END=3", "LEASE=1", "NUM_RENEWALS=1")),
    ],
    ids=named,
)
def test_j02_nor_in_larger_worlds(tmp_path: Path, model: str, options: Options) -> None:
    verdict = search(tmp_path, model, *options)
    assert verdict.num_errors == 0, verdict.error
    assert verdict.is_complete


@pytest.mark.parametrize(
    "options",
    [
        ("NB=2", "NO_READS", "DEVICE_IN_ORDER"),
        ("DEPTH=1", "END_BETWEEN_STEPS"),
    ],
    ids=named,
)
def test_a17_without_a_fence_nothing_is_spoilt_where_none_is_needed(
    tmp_path: Path, options: Options
) -> None:
    verdict = search(tmp_path, FENCES, *options, *IMMEDIATE)
    assert verdict.num_errors == 0, verdict.error
    assert verdict.is_complete


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("DEVICE_IN_ORDER",),
        ("NO_READS",),
        ("DEPTH=1", "DEVICE_IN_ORDER"),
    ],
    ids=named,
)
def test_a17_without_a_fence_bytes_are_spoilt_where_one_is_needed(
    tmp_path: Path, options: Options
) -> None:
    verdict = search(tmp_path, FENCES, *options, *IMMEDIATE, optimize=False)
    assert verdict.num_errors == 1
    assert SPOILT in verdict.error


@pytest.mark.parametrize(
    ("guard", "options", "broken"),
    [
        ("NO_STEP_FENCE", (), STALE_WRITE),
        ("FENCE_ON_OLDEST_STEP", (), STALE_WRITE),
        ("FENCE_BY_NEWEST_SEEN", (), STALE_WRITE),
        ("NO_READ_FENCE", (), STALE_WRITE),
        ("CANCEL_IS_PROOF", (), STALE_WRITE),
        ("FAILURE_IS_PROOF", (), STALE_WRITE),
        ("DISCONNECT_IS_PROOF", (), STALE_WRITE),
        ("MATCH_BY_OWNER", ("READ_BLOCKS=1",), SPOILT),
        ("ZERO_RECEIVING", (), SPOILT),
        ("ZERO_OUTSIDE_STEP", (), STALE_WRITE),
        ("PREEMPT_IN_FLIGHT", (), COUNTED_BELOW_ZERO),
    ],
)
def test_j03_a_pool_needs_each_guard(
    tmp_path: Path, guard: str, options: Options, broken: str
) -> None:
    verdict = search(tmp_path, FENCES, guard, *options, optimize=False)
    assert verdict.num_errors == 1
    assert broken in verdict.error


@pytest.mark.parametrize(
    ("guard", "options", "broken"),
    [
        ("TRUST_AFTER_LEASE", ONE_PIECE, UNHELD_BYTES),
        ("LEASE_FROM_RECEIPT", ONE_PIECE, UNHELD_BYTES),
        ("RENEWAL_FROM_RECEIPT", ONE_PIECE, UNHELD_BYTES),
        ("COUNT_PIECES", TWO_PIECES, UNHELD_BYTES),
        ("NO_ATTEMPT", ONE_PIECE, UNHELD_BYTES),
        ("NO_INCARNATION", ONE_PIECE, UNHELD_BYTES),
        ("CANCEL_IS_PROOF", ONE_PIECE, TAKEN_BLOCK),
        ("DISCONNECT_IS_PROOF", ONE_PIECE, TAKEN_BLOCK),
        ("NO_READ_TIMEOUT", ONE_PIECE, REQUEST_STUCK),
        ("NO_PREFILL_TIMEOUT", ONE_PIECE, REQUEST_STUCK),
        ("NO_CONFIRM_TIMEOUT", ONE_PIECE, REQUEST_STUCK),
        ("NO_QUARANTINE_BOUND", TWO_PIECES, TOO_MUCH_QUARANTINE),
        ("NO_ENDED_MEMORY", ONE_PIECE, UNHELD_BYTES),
        ("REVOKE_FREES", ONE_PIECE, UNHELD_BYTES),
        ("LOST_READER_FREES", ONE_PIECE, UNHELD_BYTES),
        ("RELEASE_TWICE", ONE_PIECE, RELEASED_TWICE),
        ("RENEW_WITHOUT_EXTENSION", ONE_PIECE, UNHELD_BYTES),
        ("NO_EXPIRY", ONE_PIECE, LEASE_STUCK),
    ],
)
def test_j03_a_transfer_needs_each_guard(
    tmp_path: Path, guard: str, options: Options, broken: str
) -> None:
    verdict = search(tmp_path, LEASES, guard, *options, optimize=False)
    assert verdict.num_errors == 1
    assert broken in verdict.error


@pytest.mark.parametrize(
    ("model", "options"), [(FENCES, ()), (LEASES, ONE_PIECE), (LEASES, TWO_PIECES)]
)
def test_j03_something_is_delivered_at_all(tmp_path: Path, model: str, options: Options) -> None:
    """While a fence holds, and in a second attempt: or the searches above would be of nothing."""
    verdict = search(tmp_path, model, "NEVER_DELIVERED", *options, optimize=False)
    assert verdict.num_errors == 1


@pytest.mark.parametrize(
    ("claim", "options"),
    [("every_release_ends", ()), ("every_receive_ends", ("PATIENT",))],
)
@pytest.mark.parametrize("num_blocks", ["NB=2", pytest.param("NB=3", marks=pytest.mark.slow)])
def test_j05_every_release_and_every_receive_ends(
    tmp_path: Path, claim: str, options: Options, num_blocks: str
) -> None:
    verdict = search(
        tmp_path, FENCES, "LIVENESS", num_blocks, *options, kind=Kind.LIVENESS, claim=claim
    )
    assert verdict.num_errors == 0, verdict.error
    assert verdict.is_complete


@pytest.mark.parametrize(
    ("claim", "options"),
    [("every_release_ends", ()), ("every_receive_ends", ("PATIENT",))],
)
def test_i06_without_tear_down_a_silent_read_withholds_blocks_for_ever(
    tmp_path: Path, claim: str, options: Options
) -> None:
    verdict = search(
        tmp_path,
        FENCES,
        "LIVENESS",
        "NB=2",
        "NO_READ_TIMEOUT",
        *options,
        kind=Kind.LIVENESS,
        claim=claim,
        optimize=False,
    )
    assert verdict.num_errors == 1
    assert NEVER_ENDS in verdict.error


def test_j05_every_run_of_a_transfer_comes_to_its_end(tmp_path: Path) -> None:
    """So the assertions where nothing can happen any more tell of every run."""
    verdict = search(tmp_path, LEASES, *ONE_PIECE, "NUM_TROUBLES=1", kind=Kind.CYCLE)
    assert verdict.num_errors == 0, verdict.error
    assert verdict.is_complete
