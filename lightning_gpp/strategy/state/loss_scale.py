"""The scale of the loss in mixed precision with float16: the same one on all ranks.

Gradients that are too large for float16 show as infinities and NaNs; then the step is skipped and
the scale gets smaller. A rank sees the gradients of its own stages only, so all ranks hear what any
of them found: a step is skipped on all of them or on none, and their scales stay equal.

Source: dynamic loss scaling, Micikevicius et al., "Mixed precision training" (ICLR 2018), section
3.2, as ``torch.amp.GradScaler`` does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_gpp.common.host_copies import to_host


class AgreedScaler(GradScaler):
    """A ``GradScaler`` whose ranks agree on whether gradients are finite.

    All ranks have to unscale the same optimizers in the same order. Its numbers are on the CPU,
    where ranks on devices of any type can add them up and nothing waits to look at them: the host
    waits for the device once a step, for what was found in the gradients.

    Attributes:
        total: of a number on all ranks.
    """

    total: Callable[[Tensor], Tensor]

    @classmethod
    def like(cls, scaler: GradScaler, device: torch.device) -> AgreedScaler:
        """One with the scale and the factors of another.

        Args:
            scaler: the other; Lightning makes one for a GPU, which disables itself where there is
                none.
            device: of this rank.
        """
        was_meant = scaler._device == "cuda" and not torch.cuda.is_available()
        has_numbers = device.type != "meta"  # without them all gradients are finite
        kind = device.type if has_numbers else "cpu"
        made = cls(kind, enabled=has_numbers and (scaler.is_enabled() or was_meant))
        if scaler.is_enabled():
            made.load_state_dict(scaler.state_dict())
        return made

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscales the gradients of this rank; on how many ranks one is not finite, by device."""
        found = super()._unscale_grads_(
            optimizer, self._pinned(inv_scale), self._pinned(found_inf), allow_fp16
        )
        count = torch.zeros(())
        for own in to_host(found.values()):
            count += own
        count = self.total(count)
        return {count.device: count}

    def scale(self, outputs: Any) -> Any:
        """Outputs times the scale, which a kernel takes from the host as it is."""
        if not (self._enabled and isinstance(outputs, Tensor)):
            return super().scale(outputs)
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        assert self._scale is not None
        return outputs * self._scale

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def _pinned(self, tensor: Tensor) -> Tensor:
        """A number of which copies to the device are not waited for."""
        return tensor if self._device == "cpu" else tensor.pin_memory()
