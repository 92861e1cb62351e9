"""Private names of torch, in one place; a test calls each of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode


def keeps_graph() -> bool:
    """Inside of a backward: whether it was asked to keep the graph (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def will_reach(leaf: Tensor) -> bool:
    """Inside of a backward: whether it goes on to accumulate the gradient of a leaf.

    ``backward()`` does, ``torch.autograd.grad`` for other tensors does not.
    """
    return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))


def innermost_function_mode() -> TorchFunctionMode | None:
    """The mode that sees calls of torch first; None where there is none."""
    count = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(count - 1) if count else None


def when_backward_ends(call: Callable[[], None]) -> None:
    """Inside of a backward: calls this when all of it is done."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def foreach_norm(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The 2-norm of every tensor, accumulated in ``dtype``; few kernels for all of them.

    ``torch.nn.utils.get_total_norm`` calls it, too, but accumulates in the tensors' own dtype.
    """
    return torch._foreach_norm(tensors, 2, dtype=dtype)
