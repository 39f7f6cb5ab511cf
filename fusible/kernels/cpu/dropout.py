"""Dropout without a stored mask; see csrc/dropout.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.kernels.dropout import ddropout, dropout, dropout_add, new_seed
from fusible.kernels.library import applies, operators


@dropout.backend("cpu", applies)
def _(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    seed = new_seed()
    return operators.dropout(x, seed, 1 / (1 - p)), seed


@dropout_add.backend("cpu", applies)
def _(x: Tensor, residual: Tensor, p: float) -> tuple[Tensor, Tensor]:
    seed = new_seed()
    return operators.dropout_add(x, residual, seed, 1 / (1 - p)), seed


@ddropout.backend("cpu", applies)
def _(dy: Tensor, mask: Tensor, scale: float) -> Tensor:
    if mask.dtype is torch.bool:
        return ddropout.body(dy, mask, scale)
    return operators.dropout(dy, mask, scale)
