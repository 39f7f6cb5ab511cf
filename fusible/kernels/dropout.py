"""Dropout with torch's generator: the values and the random stream of `torch.nn.functional.dropout`."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.kernels.registry import kernel


@kernel
def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """`x mask / (1 - p)` for `0 < p < 1`; the mask's elements are true with probability `1 - p`. Returns (y, mask)."""
    return torch.native_dropout(x, p, True)


@kernel
def ddropout(dy: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`dy mask scale`."""
    return (dy * mask).mul_(scale)
