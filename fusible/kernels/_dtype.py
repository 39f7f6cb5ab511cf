"""The dtype in which kernels calculate, where that is not the tensors' own."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and reductions: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def to(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t.to(dtype)`, without the call where there is nothing to do."""
    return t if t.dtype is dtype else t.to(dtype)
