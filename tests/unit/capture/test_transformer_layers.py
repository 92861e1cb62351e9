"""torch.nn's transformer layers and stacks."""

from __future__ import annotations

import pytest
from pipelined import assert_partitions_exact, data
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("error")


class Encoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_layers_of_a_transformer_encoder_are_operators() -> None:
    captured = assert_partitions_exact(Encoders(), data(4, 3, 8))
    assert {"encoder_layers_0", "encoder_layers_1"} <= {o.name for o in captured.graph}
