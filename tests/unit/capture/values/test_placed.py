"""Arguments that move; ``meta`` plays the GPU."""

from __future__ import annotations

import torch

from lightning_gpp.capture import placed

META, CPU = torch.device("meta"), torch.device("cpu")


def test_nested_arguments_move_and_keep_what_they_are() -> None:
    wanted = torch.ones(2, requires_grad=True)
    args, kwargs = placed(((wanted, 3), {"rows": [torch.ones(1, dtype=torch.int64)]}), META)
    assert args[0].is_meta and args[0].requires_grad and args[0].is_leaf and args[1] == 3
    assert kwargs["rows"][0].is_meta and not kwargs["rows"][0].requires_grad
    assert placed(wanted, CPU) is wanted
