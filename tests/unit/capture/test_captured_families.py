"""Every family of models: any partition and any number of samples compute what the module does."""

from __future__ import annotations

import pytest
import torch
from helpers.families import FAMILIES, EncoderTower, FamilyData
from pipelined import assert_partitions_exact, run_whole

from lightning_gpp.capture import capture
from lightning_gpp.capture.errors import GuardError


def batch(inputs: tuple[str, ...], num_samples: int) -> list[torch.Tensor]:
    data = FamilyData(num_samples=num_samples, batch_size=num_samples, inputs=inputs)
    return next(iter(data.loader()))[:-1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_captured_exactly(name: str) -> None:
    network, inputs = FAMILIES[name]
    module = network().double()
    captured = assert_partitions_exact(module, *batch(inputs, 4), num_partitions=2)
    assert len(captured.graph) > 2
    for num_samples in (1, 3, 5):
        other = batch(inputs, num_samples)
        for training in (True, False):
            module.train(training)
            torch.testing.assert_close(run_whole(captured, *other), module(*other))
        with torch.inference_mode():  # as Lightning validates
            torch.testing.assert_close(run_whole(captured, *other), module(*other))


def test_layers_with_padding_at_the_end_are_operators() -> None:
    module, (x, padding) = EncoderTower().double(), batch(("sequence", "padding"), 4)
    captured = capture(module, (x, padding))
    assert {"encoder.layers.0", "encoder.layers.1"} <= {*captured.leaf_modules}
    assert not captured.kept_whole
    padding[:, 0] = True
    module.eval()
    with torch.no_grad(), pytest.raises(GuardError, match="enable_nested_tensor=False"):
        run_whole(captured, x, padding)


def test_an_encoder_with_padding_elsewhere_stays_whole() -> None:
    module, (x, padding) = EncoderTower().double(), batch(("sequence", "padding"), 4)
    padding[1] = torch.arange(len(padding[1])) == 1
    captured = capture(module, (x, padding))
    assert "encoder" in captured.leaf_modules
    assert "not at the end of every sample" in str(captured.decision)
