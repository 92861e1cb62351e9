"""Costs of the operators of one model at one micro-batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_gpp.common.checks import LARGEST


@dataclass(frozen=True, slots=True)
class OpProfile:
    """Costs of one operator for one micro-batch.

    Attributes:
        forward_s: seconds of its forward.
        backward_s: seconds of its backward (both halves).
        activation_bytes: bytes it keeps for its backward.
        forward_flops: floating-point operations of its forward; 0 where they are not known.

    Raises:
        ValueError: one is negative or not finite.
    """

    forward_s: float
    backward_s: float = 0.0
    activation_bytes: int = 0
    forward_flops: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.forward_s, self.backward_s, self.activation_bytes, self.forward_flops)
        if min(numbers) < 0 or not sum(numbers) <= LARGEST:
            raise ValueError(f"costs must be numbers of at least 0, got {self}")


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of all operators of a model at one micro-batch size, on one kind of device.

    Attributes:
        operators: operator name -> its costs.
        microbatch_size: samples in the micro-batch; not a whole number between measured sizes.
        device: kind of the device (``"cpu"``, ``"NVIDIA H100 80GB HBM3"``).
        is_estimated: whether the seconds were not measured on such a device.

    Raises:
        ValueError: the micro-batch holds nothing.
    """

    operators: Mapping[str, OpProfile]
    microbatch_size: float
    device: str = "cpu"
    is_estimated: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.microbatch_size <= LARGEST:
            raise ValueError(f"microbatch_size must be above 0 samples, got {self.microbatch_size}")

    def slower(self, factor: float) -> Profile:
        """The same where everything takes so much longer."""
        operators = {
            name: replace(one, forward_s=one.forward_s * factor, backward_s=one.backward_s * factor)
            for name, one in self.operators.items()
        }
        return replace(self, operators=operators)
