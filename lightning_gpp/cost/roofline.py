"""Estimates an operator's seconds from its work and the device's data sheet.

The roofline model (Williams, Waterman and Patterson, CACM 52(4), 2009): an operator takes as long
as its floating-point operations at the sustained speed, or as moving its bytes at the sustained
memory bandwidth, whichever is longer, and each kernel takes a while to start::

    forward_s = num_kernels * launch_s + max(flops / flops_per_s, moved_bytes / memory_bytes_per_s)

So a micro-batch of few samples costs more per sample: the parameters are read, and the kernels
started, once per micro-batch. A backward is two such operators, one for the gradient of the input
and one for that of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_gpp.cluster import DeviceKind
from lightning_gpp.cost.costs import Costs
from lightning_gpp.cost.profile import OpProfile, Profile
from lightning_gpp.cost.work import OpWork

BACKWARD_PER_FORWARD = 2.0
"""A backward computes two gradients, of the input and of the parameters."""


def roofline(work: OpWork, num_samples: float, kind: DeviceKind) -> OpProfile:
    """Estimated costs of an operator for one micro-batch on a kind of device.

    Args:
        work: what it does.
        num_samples: of the micro-batch.
        kind: where.

    Raises:
        ValueError: the kind does not know the dtype of the work's flops.

    >>> from lightning_gpp.cost.work import Line
    >>> matmul = OpWork(flops=Line(per_sample=4e6), moved_bytes=Line(per_sample=1e3, fixed=8e6))
    >>> device = DeviceKind("toy", {"float32": 1e12}, 1e12, launch_s=1e-6)
    >>> [roofline(matmul, size, device).forward_s for size in (1, 10)]  # by memory, by computing
    [9.001e-06, 4.1e-05]
    """
    flops = work.flops.at(num_samples)
    compute_s = flops / kind.flops_per_s(work.dtype) if flops else 0.0
    memory_s = work.moved_bytes.at(num_samples) / kind.memory_bytes_per_s
    forward_s = work.num_kernels * kind.launch_s + max(compute_s, memory_s)
    kept_bytes = round(work.activation_bytes.at(num_samples))
    return OpProfile(forward_s, BACKWARD_PER_FORWARD * forward_s, kept_bytes, flops)


def roofline_costs(
    works: Mapping[str, OpWork], kinds: Iterable[DeviceKind], sizes: Iterable[float]
) -> Costs:
    """Estimated costs of a model at several micro-batch sizes on several kinds of devices.

    Args:
        works: operator name -> its work.
        kinds: the kinds; see :meth:`~lightning_gpp.cluster.Cluster.device_kind`.
        sizes: micro-batch sizes, in samples; :func:`powers_of_two` of the mini-batch, say.
    """
    sizes = tuple(sizes)
    return Costs(
        tuple(
            Profile(
                {name: roofline(work, size, kind) for name, work in works.items()},
                size,
                kind.name,
                is_estimated=True,
            )
            for kind in kinds
            for size in sizes
        )
    )


def powers_of_two(largest: int) -> tuple[float, ...]:
    """All powers of two up to a number.

    >>> powers_of_two(12)
    (1.0, 2.0, 4.0, 8.0)
    """
    return tuple(float(2**power) for power in range(largest.bit_length()))
