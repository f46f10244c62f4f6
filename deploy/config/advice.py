"""What a config may say and seldom means. Pure, but for ``Machine`` and ``RAY_ADDRESS``."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from core.config import SluiceConfig
from core.config_layers import Place
from deploy.cluster.environment import cluster_address
from deploy.config.reference import reference
from deploy.config.settings import PREFIX
from deploy.doctor.config import worker_host_gib
from deploy.doctor.machine import GIB, Machine


@dataclass(frozen=True, slots=True)
class Advice:
    """A combination that is allowed, and what comes of it."""

    places: tuple[Place, ...]
    """The fields concerned."""
    text: str
    """Their values, what comes of them, and what to give instead."""


def advise(config: SluiceConfig, machine: Machine) -> list[Advice]:
    """Return what is unwise in ``config``, on ``machine`` if that is where it starts workers."""
    is_on_one_machine = cluster_address(config.deploy) is None
    return [
        *(memory_advice(config, machine) if is_on_one_machine else ()),
        *_shapes(config),
        *_times(config),
        *_numbers(config),
        *(_ports(config) if is_on_one_machine else ()),
        *_storage(config),
    ]


def misspelt_variables(environment: Mapping[str, str]) -> list[Advice]:
    """Return what variables look like a field's and say nothing.

    ``SLUICE_ROUTER_PORT=tcp://...`` is what Kubernetes sets for a service of that name.
    """
    names = [field.name for section in reference() for field in section.fields]
    variables = [PREFIX + name.upper().replace(".", "__") for name in names]
    meant = {_letters(variable): variable for variable in variables}
    return [
        Advice((), f"environment variable {name} says nothing; write {meant[_letters(name)]}")
        for name, value in sorted(environment.items())
        if not name.upper().startswith(PREFIX)
        and _letters(name) in meant
        and not value.startswith("tcp://")
    ]


def _letters(variable: str) -> str:
    return re.sub("_+", "_", variable.upper())


def memory_advice(config: SluiceConfig, machine: Machine) -> Iterator[Advice]:
    """Yield what is unwise in all workers of ``config`` on ``machine``."""
    total_nbytes = machine.meminfo_nbytes("MemTotal")
    if total_nbytes is None:
        return
    counts = config.deploy.counts
    needed_gib = sum(count * worker_host_gib(config, role) for role, count in counts.items())
    if needed_gib * GIB > total_nbytes:
        yield Advice(
            (("cache", "memory_gib"), ("cache", "host_tier_gib"), ("deploy", "decode")),
            f"cache: the pools and host tiers of {counts['prefill']} prefill and "
            f"{counts['decode']} decode workers take {needed_gib:.1f} GiB, and this machine "
            f"has {total_nbytes / GIB:.1f}; lower cache.memory_gib or the number of workers",
        )


def _shapes(config: SluiceConfig) -> Iterator[Advice]:
    if config.deploy.prefill == 0:
        if config.prefill:
            text = "prefill: no prefill worker is started (deploy.prefill=0), so this says nothing"
            yield Advice((("prefill",),), text)
        return
    prefill, decode = config.for_role("prefill"), config.for_role("decode")
    sizes = (prefill.cache.block_size, decode.cache.block_size)
    if sizes[0] != sizes[1]:
        yield Advice(
            tuple((role, "cache", "block_size") for role in ("prefill", "decode")),
            f"cache.block_size: {sizes[0]} on prefill and {sizes[1]} on decode: KV is converted on "
            "arrival, which costs decode time; give equal ones unless one side needs its own",
        )


def _times(config: SluiceConfig) -> Iterator[Advice]:
    own = config.for_role("decode").transfer
    if own.lease_s < own.read_timeout_s:
        yield Advice(
            _transfer("lease_s", "read_timeout_s"),
            f"transfer.lease_s={own.lease_s:g} is shorter than "
            f"read_timeout_s={own.read_timeout_s:g}: where renewals do not get through, prefill "
            "reuses blocks before a slow read of them is given up, and what it brought is thrown "
            "away; give a longer lease or a shorter timeout",
        )
    lease_s = config.for_role("prefill").transfer.lease_s
    if config.deploy.prefill and own.renew_interval_s * 2 > lease_s:
        yield Advice(
            (("prefill", "transfer", "lease_s"), ("decode", "transfer", "renew_interval_s")),
            f"transfer: decode renews every {own.renew_interval_s:g} s and prefill's leases last "
            f"{lease_s:g} s: one late renewal loses them; renew at least twice as often",
        )
    if own.prefill_timeout_s > config.router.request_timeout_s:
        yield Advice(
            (*_transfer("prefill_timeout_s"), ("router", "request_timeout_s")),
            f"transfer.prefill_timeout_s={own.prefill_timeout_s:g} is longer than "
            f"router.request_timeout_s={config.router.request_timeout_s:g}: a request ends before "
            "its prefill is given up; give a shorter one",
        )


def _numbers(config: SluiceConfig) -> Iterator[Advice]:
    own = config.for_role("decode").scheduler
    if own.max_batch_tokens < own.max_num_seqs:
        yield Advice(
            _decode_scheduler("max_batch_tokens", "max_num_seqs"),
            f"scheduler.max_batch_tokens={own.max_batch_tokens} on decode is less than one token "
            f"for each of max_num_seqs={own.max_num_seqs}: so many never run in one step; give "
            "more tokens or fewer sequences",
        )
    running = own.max_num_seqs * config.deploy.decode
    if config.router.max_pending_requests < running:
        yield Advice(
            (("router", "max_pending_requests"), *_decode_scheduler("max_num_seqs")),
            f"router.max_pending_requests={config.router.max_pending_requests} is less than the "
            f"{running} sequences that the decode workers run at once: requests are answered 503 "
            "while there is room; give at least as many",
        )


def _ports(config: SluiceConfig) -> Iterator[Advice]:
    num_workers = sum(config.deploy.counts.values())
    port = config.metrics.port
    if not port:
        return
    if num_workers > 1:
        yield Advice(
            (("metrics", "port"),),
            f"metrics.port={port}: {num_workers} workers on one machine cannot all listen there; "
            "give 0 for a free one each, or have one worker per host or pod",
        )
    elif port in {config.router.port, config.router.control_port}:
        yield Advice(
            (("metrics", "port"), ("router", "port"), ("router", "control_port")),
            f"metrics.port={port}: the router listens there, on the same machine; give another "
            "one, or 0 for a free one",
        )


def _storage(config: SluiceConfig) -> Iterator[Advice]:
    if (config.cache.storage_url or "").startswith("memory:"):
        yield Advice(
            (("cache", "storage_url"),),
            "cache.storage_url: memory:/// is each process's own and ends with it, for tests; "
            "give a folder or a bucket",
        )


def _transfer(*names: str) -> tuple[Place, ...]:
    """Return the places where decode workers may have these fields from."""
    return tuple(
        (*section, name) for name in names for section in (("decode", "transfer"), ("transfer",))
    )


def _decode_scheduler(*names: str) -> tuple[Place, ...]:
    return tuple(
        (*section, name) for name in names for section in (("decode", "scheduler"), ("scheduler",))
    )
