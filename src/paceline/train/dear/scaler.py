"""``paceline.GradScaler``: PyTorch's, except that it unscales gradients before they are gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

UNSCALE = "_unscale_reduced"
"""The attribute of a wrapped optimizer that unscales the parts of the mean gradients that this rank has."""


class GradScaler(torch.amp.GradScaler):
    """In the place of :class:`torch.amp.GradScaler` with a :class:`paceline.DataParallel`::

        scaler = paceline.GradScaler("cuda")

    The other works, too, but reads all gradients before step(), so that they have to be gathered at that moment. This
    one looks at each rank's part of them, and the all-gather stays hidden behind the next forward pass. For other
    optimizers it is PyTorch's. Every rank must call it, as with DDP.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        unscale: Any = getattr(optimizer, UNSCALE, None)
        found: dict[torch.device, torch.Tensor] | None = unscale(inv_scale, found_inf, allow_fp16) if unscale else None
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16) if found is None else found
