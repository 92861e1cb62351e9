from __future__ import annotations

import pytest

from lightning_gpp.cluster import DeviceKind
from lightning_gpp.cost import Line, OpWork, roofline_costs

SLOW = DeviceKind("slow", {"float32": 1e9, "float16": 4e9}, 1e8, launch_s=1e-3)
FAST = DeviceKind("fast", {"float32": 1e12}, 1e11)
MATMUL = OpWork(
    flops=Line(per_sample=2e6),
    moved_bytes=Line(per_sample=1e3, fixed=1e6),
    activation_bytes=Line(per_sample=500, fixed=20),
)


def test_seconds_are_of_memory_for_few_samples_and_of_compute_for_many():
    costs = roofline_costs({"matmul": MATMUL}, [SLOW], (1, 2, 100))
    forward_s = [costs.at(size, "slow").operators["matmul"].forward_s for size in (1, 2, 100)]
    assert forward_s == pytest.approx([1e-3 + 1.001e-2, 1e-3 + 1.002e-2, 1e-3 + 0.2])


def test_flops_in_another_type_are_faster():
    half = OpWork(flops=Line(per_sample=2e9), dtype="float16")
    costs = roofline_costs({"half": half}, [SLOW], [1])
    assert costs.at(1, "slow").operators["half"].forward_s == pytest.approx(1e-3 + 0.5)
    with pytest.raises(ValueError, match="'fast' computes in float16 is not known"):
        roofline_costs({"half": half}, [FAST], [1])


def test_negative_work_is_refused():
    with pytest.raises(ValueError, match="work cannot be negative"):
        Line(per_sample=-1.0)
