"""Sums of replicas' gradients begin while the backward pass runs, in a fixed order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.graph import StageEdge, StageGraph
from lightning_gpp.runtime import sums as sums_module
from lightning_gpp.runtime.sums import GradientReduction
from lightning_gpp.schedule import Action, Kind, build_program

NAMES = ("first", "second", "third")


class Noting:
    """Sums that only note what begins, as if every other replica had the same gradients."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def start(self, tensor: Tensor, ranks: tuple[int, ...]) -> Noting:
        self.log.append(f"sum of {len(tensor)} over {ranks}")
        tensor *= len(ranks)
        return self

    def abort(self, error: BaseException) -> None:
        raise AssertionError

    def __call__(self, timeout_s: float, purpose: str) -> None:
        self.log.append(f"wait {purpose}")


def reduction_of(parameters: dict[str, Parameter], log: list[str]) -> GradientReduction:
    stages = StageGraph(
        2,
        (StageEdge(0, 1, ("x",)),),
        parameter_readers=tuple((name, (0,)) for name in parameters),
    )
    program = build_program(stages, devices=[(0, 1), 2], num_microbatches=4, shares=[(1, 1), (2,)])
    return GradientReduction(program, 1, (2, 1, 0), parameters, Noting(log))


def chain(parameters: dict[str, Parameter], log: list[str]) -> Tensor:
    """Uses the parameters one after the other; notes when each gets its gradient."""
    x = torch.ones(3)
    for name, parameter in parameters.items():
        x = x * parameter
        x.register_hook(lambda _, name=name: log.append(f"backward of {name}"))
    return x.sum()


@pytest.fixture
def parameters(monkeypatch: pytest.MonkeyPatch) -> dict[str, Parameter]:
    monkeypatch.setattr(sums_module, "BUCKET_BYTES", 1)  # every parameter is a bucket
    return {name: Parameter(torch.full((3,), 2.0)) for name in NAMES}


def test_sums_begin_during_the_last_backward(parameters):
    log: list[str] = []
    sums = reduction_of(parameters, log)
    for microbatch in range(2):
        with sums.watching(Action(1, Kind.BACKWARD, microbatch)):
            chain(parameters, log).backward()
        log.append(f"end of {microbatch}")
    backwards = [f"backward of {name}" for name in reversed(NAMES)]
    assert log[:4] == [*backwards, "end of 0"]
    begins = "sum of 4 over (1, 2)"  # three gradients, and whether they exist
    assert log.count(begins) == 3
    assert log.index(begins) < log.index("backward of first", 4)
    assert log[-1] == "end of 1"
    sums.finish(0, 1.0, "stage 0")
    for parameter in parameters.values():
        assert parameter.grad.tolist() == [2 * 2 * 4.0] * 3  # replicas, micro-batches, 2 * 2


def test_without_a_gradient_zeros_take_part_and_none_stays(parameters):
    log: list[str] = []
    sums = reduction_of(parameters, log)
    used = {name: parameters[name] for name in ("first", "third")}
    with sums.watching(Action(1, Kind.BACKWARD, 1)):
        chain(used, log).backward()
    assert sum(line.startswith("sum") for line in log) == 3
    sums.finish(0, 1.0, "stage 0")
    assert parameters["second"].grad is None
    assert parameters["first"].grad.tolist() == [2 * 2.0] * 3


def test_a_gradient_that_only_others_have_is_taken_over(parameters):
    sums = reduction_of(parameters, [])
    with sums.watching(Action(1, Kind.BACKWARD, 1)):
        chain({"first": parameters["first"]}, []).backward()
    for bucket in sums._buckets:
        bucket.flat[-1] += 1  # another replica has all
        bucket.flat[:-1] += 5
    sums.finish(0, 1.0, "stage 0")
    assert parameters["first"].grad.tolist() == [2 * 1 + 5.0] * 3
    assert parameters["second"].grad.tolist() == [5.0] * 3


def test_sparse_gradients_that_nobody_announced_are_refused():
    weight = Parameter(torch.ones(4, 2))
    sums = reduction_of({"table": weight}, [])
    with (
        pytest.raises(RuntimeError, match="'table' has a sparse gradient"),
        sums.watching(Action(1, Kind.BACKWARD, 1)),
    ):
        torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
