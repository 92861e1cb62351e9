"""Arguments of an operator that name the sizes of a whole tensor, as sizes of a device's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.run.collectives import Shape

_SIZES = ("size", "shape")
"""Names that schemas give to the sizes of the whole result."""


def local_arguments(
    kind: str,
    arguments: Mapping[str, Any],
    placements: Sequence[Placement],
    shapes: Sequence[Shape],
) -> dict[str, Any]:
    """Arguments for a device's part.

    Args:
        kind: of the operator.
        arguments: for the whole tensors.
        placements: of its outputs.
        shapes: of the device's parts of its outputs.

    >>> from lightning_gpp.spmd.placement import shard
    >>> local_arguments("view", {"size": [4, 2, -1]}, [shard(0, 4)], [(3, 2, 5)])
    {'size': [3, 2, 5]}
    """
    local = dict(arguments)
    if not placements or not placements[0].is_shard:
        return local
    shape, dim = shapes[0], placements[0].dim
    assert dim is not None
    for name in _SIZES:
        if isinstance(local.get(name), tuple | list) and len(local[name]) == len(shape):
            local[name] = list(shape)
    if kind == "unflatten":
        count = len(local["sizes"])
        start = local["dim"] % (len(shape) - count + 1)
        local["sizes"] = list(shape[start : start + count])
    if kind in ("split", "unsafe_split") and local.get("dim", 0) % len(shape) == dim:
        local["split_size"] = shape[dim]
    if kind == "split_with_sizes" and local.get("dim", 0) % len(shape) == dim:
        local["split_sizes"] = [each[dim] for each in shapes]
    return local
