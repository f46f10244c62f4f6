"""What serving must reach against its peers, measured in the same run."""

from bench.figures import Aim

_COLOCATED_VLLM_SHARE = {1: 0.92, 8: 0.84, 32: 0.75}
"""What vLLM's own 1P1D keeps of its colocated throughput on two cores, by concurrency."""

SERVE_AIMS: tuple[Aim, ...] = (
    *(
        Aim(
            name=f"output tok/s at c{concurrency}, at least {share} of colocated vLLM's",
            system="sluice-1p1d",
            peer="vllm",
            concurrency=concurrency,
            figure="output_tok_s",
            factor=share,
            better="higher",
        )
        for concurrency, share in _COLOCATED_VLLM_SHARE.items()
    ),
    Aim(
        name="TTFT p50 at c1, at most 1.6 of colocated vLLM's",
        system="sluice-1p1d",
        peer="vllm",
        concurrency=1,
        figure="ttft_ms_p50",
        factor=1.6,
        better="lower",
    ),
    Aim(
        name="ITL p99 at c32, at most 0.25 of colocated vLLM's",
        system="sluice-1p1d",
        peer="vllm",
        concurrency=32,
        figure="itl_ms_p99",
        factor=0.25,
        better="lower",
    ),
    *(
        Aim(
            name=f"output tok/s at c{concurrency}, at least vLLM 1P1D's",
            system="sluice-1p1d",
            peer="vllm-1p1d",
            concurrency=concurrency,
            figure="output_tok_s",
            factor=1.0,
            better="higher",
        )
        for concurrency in _COLOCATED_VLLM_SHARE
    ),
)
