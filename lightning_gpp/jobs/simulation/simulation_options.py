"""What the job ``simulate`` reads from its configuration: how a step runs, links, what-if factors.

Every error names the key that is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf

from lightning_gpp.cluster import AllReduce, Cluster, HostLink, Link
from lightning_gpp.jobs.options import as_mapping
from lightning_gpp.simulate.plan_costs import Overlap
from lightning_gpp.simulate.program_costs import Overhead, StepCosts
from lightning_gpp.simulate.what_if.changes import WhatIf
from lightning_gpp.simulate.what_if.plan_case import RunOptions

CHOICES = {
    "all_reduce": get_args(AllReduce),
    "overlap": get_args(Overlap),
}


def run_of(config: DictConfig, cluster: Cluster, per_update: int = 1) -> RunOptions:
    """How a step is run.

    Args:
        config: of the job.
        cluster: whose devices run it.
        per_update: mini-batches that overlap after which the optimizer steps.

    Raises:
        ValueError: an option is unknown, or a number makes no sense.
    """
    for name, known in CHOICES.items():
        if config[name] not in known:
            raise ValueError(f"{name}={config[name]} is unknown; known: {', '.join(known)}")
    return RunOptions(
        step=replace(step_of(config.step, cluster), per_update=per_update),
        overlap=config.overlap,
        all_reduce=config.all_reduce,
        prefetch=config.prefetch,
    )


def step_of(config: DictConfig, cluster: Cluster) -> StepCosts:
    """What a step takes beside computing and messages.

    Raises:
        ValueError: a number is negative, or none.
    """
    bandwidth = config.host_bandwidth_bytes_per_s
    for name, value in _plain(config).items():
        _check_number(f"step.{name}", value)
    devices = range(cluster.num_devices)
    return StepCosts(
        data_s=config.data_s,
        input_bytes=config.input_bytes,
        host_link=None if bandwidth is None else _host_link(bandwidth, config.host_latency_s),
        prepare_s=config.prepare_s,
        feed_s=config.feed_s,
        turn_s=config.turn_s,
        finish_s=dict.fromkeys(devices, config.finish_s) if config.finish_s else {},
        optimizer_s=dict.fromkeys(devices, config.optimizer_s) if config.optimizer_s else {},
        send=Overhead(config.send_s),
        receive=Overhead(config.receive_s),
        action_s=config.action_s,
    )


def _host_link(bandwidth: float, latency_s: float) -> Link:
    try:
        return Link(bandwidth, latency_s)
    except ValueError as error:
        raise ValueError(f"step.host_bandwidth_bytes_per_s={bandwidth}: {error}") from error


def _check_number(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")


def with_links(cluster: Cluster, config: DictConfig) -> Cluster:
    """The cluster with the links that the configuration changes.

    Raises:
        ValueError: a number makes no sense.
    """
    host, rack, spine = (_plain(config[level]) for level in ("host", "rack", "spine"))
    rack_link, spine_link = cluster.rack_link, cluster.spine_link
    if rack:
        rack_link = _link("rack", rack_link or cluster.host_link, rack)
    if spine:
        spine_link = _link("spine", spine_link or rack_link or cluster.host_link, spine)
    if host and cluster.rack_link is None:  # what goes between hosts stays as it was
        rack_link = rack_link or cluster.host_link
    return replace(
        cluster,
        host_link=_link("host", cluster.host_link, host),
        rack_link=rack_link,
        spine_link=spine_link,
        host_links=tuple(HostLink(o.host, _link("host", o.link, host)) for o in cluster.host_links),
    )


def _link(level: str, link: Link, changes: Mapping[str, Any]) -> Link:
    for name, value in changes.items():
        if name.startswith("is_") and not isinstance(value, bool):
            raise ValueError(f"links.{level}.{name} must be true or false, got {value!r}")
        if not name.startswith("is_"):
            _check_number(f"links.{level}.{name}", value)
    try:
        return replace(link, **changes)
    except ValueError as error:
        raise ValueError(f"links.{level}: {error}") from error


def what_if_of(config: DictConfig) -> WhatIf:
    """The factors of the configuration.

    Raises:
        ValueError: a factor makes no sense.
    """
    factors = _plain(config)
    device, operators = (
        _flat(as_mapping(f"what_if.{name}", config[name])) for name in ("device", "operators")
    )
    factors["device"] = {_device(key): value for key, value in device.items()}
    factors["operators"] = operators
    return WhatIf(**factors)


def _device(key: str) -> int:
    try:
        return int(key)
    except ValueError as error:
        raise ValueError(f"what_if.device.{key}: expected the number of a device") from error


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value; names of operators may have dots, which make the configuration nested."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{inner}": factor for inner, factor in _flat(value).items()}
        else:
            found[str(key)] = value
    return found


def _plain(config: DictConfig) -> dict[str, Any]:
    """What is set of a group: that which is not null."""
    found: Any = OmegaConf.to_container(config, resolve=True)
    return {name: value for name, value in found.items() if value is not None}
