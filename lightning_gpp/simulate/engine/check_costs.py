"""Whether costs fit a program: checked before anything is simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.program_costs import MessageBytes, ProgramCosts

_STEP_NUMBERS = (
    *("data_s", "input_bytes", "prepare_s", "feed_s", "feed_backward_s"),
    *("loss_s", "loss_backward_s", "turn_s", "action_s"),
)


def check_costs(program: Program, costs: ProgramCosts) -> None:
    """Checks that costs are complete and make sense.

    Raises:
        ValueError: the cluster has fewer devices than the program, costs of a stage or an edge are
            missing, a bucket is of no reduce group, or a number is negative or not a number; the
            text names the thing.
    """
    _check_sizes(program, costs)
    for edge in program.edges:
        if not program.is_local(edge):
            _check_edge(edge, costs.forward_bytes, "forward_bytes")
            if edge.has_backward and program.has_backward:
                _check_edge(edge, costs.backward_bytes, "backward_bytes")
    for name, value in _numbers(costs):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be a number of at least 0, got {value}")
    for index, bucket in enumerate(costs.buckets):
        if not 0 <= bucket.group < len(program.reduce_groups):
            raise ValueError(
                f"bucket {index} is of reduce group {bucket.group}, but the program has "
                f"{len(program.reduce_groups)} groups"
            )
        if not 0 <= bucket.ready_fraction <= 1:
            raise ValueError(
                f"bucket {index}: ready_fraction must be from 0 to 1, got {bucket.ready_fraction}"
            )


def _check_sizes(program: Program, costs: ProgramCosts) -> None:
    if len(program.actions) > costs.cluster.num_devices:
        raise ValueError(
            f"the program is for {len(program.actions)} devices, the cluster of the costs has "
            f"{costs.cluster.num_devices}"
        )
    if len(costs.stages) < program.num_stages:
        raise ValueError(
            f"there are no costs of stage {len(costs.stages)}: the program has "
            f"{program.num_stages} stages (replicas counted), the costs have {len(costs.stages)}"
        )
    for name in ("optimizer_s", "finish_s"):
        for device in getattr(costs.step, name):
            if not 0 <= device < costs.cluster.num_devices:
                raise ValueError(f"{name}: there is no device {device}")


def _check_edge(edge: StageEdge, sizes: Mapping[tuple[int, int], MessageBytes], name: str) -> None:
    if (edge.source, edge.target) not in sizes:
        raise ValueError(f"{name} lacks the edge {edge_name(edge.source, edge.target)}")


def edge_name(source: int, target: int) -> str:
    """An edge in words."""
    return f"from {'the feed' if source == FEED else f'stage {source}'} to stage {target}"


def _numbers(costs: ProgramCosts) -> Iterator[tuple[str, float]]:
    """All durations and sizes with their names."""
    for stage, found in enumerate(costs.stages):
        for name in ("forward_s", "backward_s", "fixed_bytes", "activation_bytes", "working_bytes"):
            yield f"stage {stage}: {name}", getattr(found, name)
    for what, sizes in (("forward", costs.forward_bytes), ("backward", costs.backward_bytes)):
        for pair, size in sizes.items():
            yield f"{what}_bytes {edge_name(*pair)}: per_unit", size.per_unit
            yield f"{what}_bytes {edge_name(*pair)}: fixed", size.fixed
    for index, bucket in enumerate(costs.buckets):
        yield f"bucket {index}: size_bytes", bucket.size_bytes
    step = costs.step
    for name in _STEP_NUMBERS:
        yield name, getattr(step, name)
    for name in ("optimizer_s", "finish_s"):
        for device, seconds in getattr(step, name).items():
            yield f"{name} of device {device}", seconds
    for name in ("send", "receive", "reduce"):
        overhead = getattr(step, name)
        yield f"{name}: fixed_s", overhead.fixed_s
        yield f"{name}: per_byte_s", overhead.per_byte_s
