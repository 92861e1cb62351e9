"""Precision plug-ins that clip and scale by the gradients of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import plugins
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_gpp.common.host_copies import to_host
from lightning_gpp.common.torch_device import widest_float
from lightning_gpp.strategy.lightning_private import foreach_norm


def pipeline_precision(plugin: plugins.Precision | None, strategy: Any) -> plugins.Precision | None:
    """The plug-in with norm clipping and one loss scale over all ranks; None stays None.

    Raises:
        NotImplementedError: the precision mode is not supported.
    """
    if plugin is None or isinstance(plugin, _ClipsOverRanks):
        return plugin
    found = _CLASSES.get(type(plugin))
    if found is None:
        raise NotImplementedError(
            f"the graphpipe strategy does not take {type(plugin).__name__}, which replaces or "
            "divides layers by itself; use one of the precisions '32-true', '64-true', "
            "'bf16-mixed', '16-mixed', 'bf16-true', '16-true'"
        )
    plugin = copy.copy(plugin)
    plugin.__class__ = found
    plugin.pipeline_strategy = strategy  # type: ignore[attr-defined]
    return plugin


def place_precision(
    plugin: plugins.Precision, device: torch.device, total: Callable[[Tensor], Tensor]
) -> None:
    """Mixed precision is that of the device of this rank, whatever Lightning took it for.

    Args:
        plugin: in use.
        device: of this rank.
        total: of a number on all ranks.
    """
    if isinstance(plugin, plugins.MixedPrecision):
        plugin.device = device.type
        if plugin.scaler is not None:
            plugin.scaler = AgreedScaler.like(plugin.scaler, device, total)


def loss_scale(plugin: plugins.Precision) -> float:
    """The factor by which the loss is multiplied before its backward."""
    scaler = plugin.scaler if isinstance(plugin, plugins.MixedPrecision) else None
    return 1.0 if scaler is None else scaler.get_scale()


class _ClipsOverRanks:
    """Norm clipping over the parameters of all ranks; shared ones count once.

    In a pipeline that does not drain every rank clips the norm of its own gradients: those of a
    mini-batch are complete only when its backward has come to the first stage, and stages that
    waited for that would do one mini-batch at a time.

    Clipping by value works on ranks without parameters, too (idle devices, stages of activations).
    """

    pipeline_strategy: Any
    """The strategy; it holds the parameters, and knows who counts them."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        super().backward(*args, **kwargs)  # type: ignore[misc]
        self.pipeline_strategy.after_backward()

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if held := _with_gradients(optimizer):  # torch fails without any
            nn.utils.clip_grad_value_(held, clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        held = _with_gradients(optimizer)
        strategy = self.pipeline_strategy
        counted = None if strategy.clips_alone else strategy.counted_parameters()
        if counted is None:
            nn.utils.clip_grad_norm_(held, clip_val)
            return
        own = {id(parameter) for parameter in counted}
        norms = _norms([p.grad for p in held if id(p) in own and p.grad is not None])
        scaler: AgreedScaler | None = getattr(self, "scaler", None)
        squares = scaler.squares(norms) if scaler else _squares(strategy.total, [norms])[0]
        factor = (clip_val / (squares.sqrt() + 1e-6)).clamp(max=1.0).item()
        if factor != 1 and held:  # NaN is another
            torch._foreach_mul_([parameter.grad for parameter in held], factor)


def _with_gradients(optimizer: Optimizer) -> list[Any]:
    groups = optimizer.param_groups
    return [p for group in groups for p in group["params"] if p.grad is not None]


def _norms(gradients: list[Tensor]) -> Tensor:
    """The norm of each, on their device."""
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    reals = [torch.view_as_real(each) if each.is_complex() else each for each in values]
    if not reals:
        return torch.zeros(0)
    return torch.stack(foreach_norm(reals, widest_float(reals[0].device)))


def _squares(total: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> Tensor:
    """The sum of squares of each on all ranks, for which the host waits for its device once.

    It is on the CPU, where ranks on devices of any type can add it up.
    """
    return total(torch.stack([each.double().square().sum() for each in to_host(tensors)]))


# A checkpoint has the state of a plug-in under the name of its class: that of one device.


class Precision(_ClipsOverRanks, plugins.Precision):
    """32-bit precision."""


class DoublePrecision(_ClipsOverRanks, plugins.DoublePrecision):
    """64-bit precision."""


class HalfPrecision(_ClipsOverRanks, plugins.HalfPrecision):
    """16-bit precision without autocast."""


class MixedPrecision(_ClipsOverRanks, plugins.MixedPrecision):
    """Autocast; for float16 with one loss scale for all ranks."""


_CLASSES: dict[type, Any] = {
    ours.__bases__[1]: ours for ours in (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
}


class AgreedScaler(GradScaler):
    """A ``GradScaler`` whose ranks agree on whether gradients are finite.

    All ranks have to unscale the same optimizers in the same order. Its numbers are on the CPU,
    where ranks on devices of any type can add them up and nothing waits to look at them: the host
    waits for the device once a step, for what was found in the gradients and for their norm.

    Attributes:
        total: of a number on all ranks.
    """

    total: Callable[[Tensor], Tensor]

    @classmethod
    def like(
        cls, scaler: GradScaler, device: torch.device, total: Callable[[Tensor], Tensor]
    ) -> AgreedScaler:
        """One with the scale and the factors of another.

        Args:
            scaler: the other; Lightning makes one for a GPU, which disables itself where there is
                none.
            device: of this rank.
            total: of a number on all ranks.
        """
        was_meant = scaler._device == "cuda" and not torch.cuda.is_available()
        made = cls(device.type, enabled=scaler.is_enabled() or was_meant)
        made.total = total
        if scaler.is_enabled():
            made.load_state_dict(scaler.state_dict())
        return made

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscales the gradients of this rank; where one is not finite is agreed on later."""
        found = super()._unscale_grads_(
            optimizer, self._pinned(inv_scale), self._pinned(found_inf), allow_fp16
        )
        count = torch.zeros(())
        flag = sum(found.values(), torch.zeros(()))
        self._per_optimizer_states[id(optimizer)]["not agreed on"] = count, flag
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # it looks at the count itself
            self._agree()
        return {count.device: count}

    def squares(self, norms: Tensor) -> Tensor:
        """The sum of the squares of norms on all ranks, who agree on their gradients as well."""
        states = self._per_optimizer_states.values()
        found = [state.pop("not agreed on") for state in states if "not agreed on" in state]
        sums = _squares(self.total, [norms, *(flag for _, flag in found)])
        for (count, _), number in zip(found, sums[1:], strict=True):
            count.copy_(number)
        return sums[0]

    def _agree(self) -> None:
        if any("not agreed on" in state for state in self._per_optimizer_states.values()):
            self.squares(torch.zeros(0))

    def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> float | None:
        self._agree()
        return super()._maybe_opt_step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Changes the scale by what all ranks found."""
        self._agree()
        super().update(new_scale)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(torch.device("cpu"))
        assert self._scale is not None
        self._scale = self._pinned(self._scale)

    def _pinned(self, tensor: Tensor) -> Tensor:
        """A number of which copies to the device are not waited for."""
        return tensor if self._device == "cpu" else tensor.pin_memory()
