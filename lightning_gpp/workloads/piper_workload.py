"""Makes a workload of an input of Piper: the model without tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_gpp.cost import ANY_DEVICE, Costs, OpProfile, Profile
from lightning_gpp.graph import (
    GraphInput,
    ModelGraph,
    OpNode,
    Parameter,
    TensorSpec,
    Value,
)
from lightning_gpp.workloads.files import batch_value, check_samples, scope_of
from lightning_gpp.workloads.piper_format import read_piper_instance, unique_names
from lightning_gpp.workloads.piper_instance import PiperInstance, PiperOperator, Tmpc
from lightning_gpp.workloads.workload import Workload

SOURCE = "Piper (NeurIPS 2021), github msr-fiddle/piper"

FORWARD_SHARE = 1 / 3
"""Of the time of forward and backward, where nothing tells them apart."""

MAX_SAMPLES_PER_DEVICE = 16
"""A mini-batch for every device. Piper's own are hundreds of times that and only make its
synchronisation cheap; so many fill a pipeline, and a program of them is still quickly played."""


def read_piper_workload(
    path: str | Path, *, time_unit_s: float | None = None, samples: int = 1
) -> Workload:
    """A workload from an input of Piper, without tensor parallelism.

    Args:
        path: the file.
        time_unit_s: seconds in one unit of ``timePerSample``; milliseconds if not given, and an
            error where those make no sense.
        samples: how many samples one of Piper's "samples" stands for (``resnet.json``: 128
            images). Micro-batches can be as small as one sample, so 1, the default, means that
            Piper's are not divided.

    Raises:
        ValueError: the file is missing or broken (the text names the key and what was expected), or
            an operator cannot run on one device.
    """
    check_samples(samples)
    instance = read_piper_instance(path, time_unit_s=time_unit_s)
    name = Path(path).name
    ways = {operator.id: _plain_ways(operator, name) for operator in instance.operators}
    return Workload(
        name=Path(path).stem,
        graph=_model_graph(instance, ways, samples),
        costs=Costs((_profile(instance, ways, samples),)),
        samples_per_device=samples
        * min(MAX_SAMPLES_PER_DEVICE, -(-instance.num_samples // instance.num_devices)),
        source=SOURCE,
    )


def _plain_ways(operator: PiperOperator, source: str) -> tuple[Tmpc, ...]:
    """The ways to run an operator on one device, the fastest first."""
    ways = operator.ways.get(1, ())
    if not ways:
        raise ValueError(
            f"{source}: operator {operator.name!r} needs tensor parallelism (TMPCs of degrees "
            f"{sorted(operator.ways)}), which plans of a model graph do not have"
        )
    return tuple(sorted(ways, key=lambda way: way.seconds_per_sample))


def _model_graph(
    instance: PiperInstance, ways: Mapping[int, tuple[Tmpc, ...]], samples: int
) -> ModelGraph:
    names = unique_names(instance.operators)
    made = {operator.id: _results(instance, operator.id) for operator in instance.operators}
    first = Value("samples", (TensorSpec((samples, 0), "int64", batch_dim=0),))

    def result(number: int, size_bytes: float) -> str:
        return f"{names[number]}_out{made[number].index(size_bytes) or ''}"

    reads: dict[int, list[str]] = {operator.id: [] for operator in instance.operators}
    for edge in instance.edges:
        reads[edge.target].append(result(edge.source, edge.size_bytes))
    weights = {
        n: Parameter(f"{names[n]}.weight", round(w[0].parameter_bytes)) for n, w in ways.items()
    }
    sources = {edge.source for edge in instance.edges}
    return ModelGraph(
        inputs=(GraphInput(first),),
        operators=tuple(
            OpNode(
                name=names[operator.id],
                target=operator.name,
                scope=scope_of(names[operator.id]),
                inputs=tuple(reads[operator.id]) or ("samples",),
                outputs=tuple(
                    batch_value(result(operator.id, size), (size,), samples)
                    for size in made[operator.id]
                ),
                parameters=(weights[operator.id].name,) if weights[operator.id].size_bytes else (),
            )
            for operator in instance.operators
        ),
        outputs=tuple(f"{names[o.id]}_out" for o in instance.operators if o.id not in sources),
        parameters=tuple(weight for weight in weights.values() if weight.size_bytes),
    )


def _results(instance: PiperInstance, number: int) -> list[float]:
    """Bytes of the results of an operator: readers of equally many bytes share one."""
    sizes = [edge.size_bytes for edge in instance.edges if edge.source == number]
    return list(dict.fromkeys(sizes)) or [0.0]


def _profile(
    instance: PiperInstance, ways: Mapping[int, tuple[Tmpc, ...]], samples: int
) -> Profile:
    names = unique_names(instance.operators)
    return Profile(
        {names[number]: _op_profile(found) for number, found in ways.items()},
        microbatch_size=samples,
        device=ANY_DEVICE,
    )


def _op_profile(ways: tuple[Tmpc, ...]) -> OpProfile:
    """Recomputing runs the forward once more, which tells forward and backward apart."""
    seconds = ways[0].seconds_per_sample
    forward_s = ways[-1].seconds_per_sample - seconds
    if not 0 < forward_s <= seconds:
        forward_s = seconds * FORWARD_SHARE
    return OpProfile(forward_s, seconds - forward_s, round(ways[0].memory_bytes_in_flight))
