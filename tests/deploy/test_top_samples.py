"""A scrape is whatever answered at an address: what it holds must not end ``sluice top``."""

import pytest

from core.errors import SluiceError
from deploy.top.samples import Samples


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_what_is_no_count_is_left_out(value: str) -> None:
    samples = Samples(f'sluice_kv_blocks{{state="free"}} {value}\nsluice_kv_leases {value}\n')

    assert samples.total("sluice_kv_leases") == 0
    assert samples.by_label("sluice_kv_blocks", "state") == {}


def test_a_bucket_without_a_bound_is_refused_when_it_is_read() -> None:
    with pytest.raises(SluiceError, match="Prometheus"):
        Samples('sluice_kv_transfer_seconds_bucket{le="soon"} 1\n')
