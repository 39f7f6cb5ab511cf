"""Sums by torch's loop, written into memory of ours where the result is large."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.kernels import residual
from fusible.kernels.cpu.linear import LARGE
from fusible.kernels.library import applies, operators


@residual.add.backend("cpu", applies)
def add(x: Tensor, other: Tensor) -> Tensor:
    if x.numel() < LARGE or x.dtype is not other.dtype:
        return x + other
    return torch.add(x, other, out=operators.empty(x.shape, x.dtype))
