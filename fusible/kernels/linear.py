"""Matrix products of a linear layer; they stay with torch (MKL, oneDNN, cuBLAS).

i, o: features in and out; `...`: any leading dimensions, or none. All arguments of a call have one dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusible.kernels.registry import kernel


@kernel
def gemm(x: Tensor, weight: Tensor) -> Tensor:
    """`x Wᵀ`: [..., i], [o, i] -> [..., o]."""
    return linear(x, weight)


@kernel
def dgemm_x(dy: Tensor, weight: Tensor) -> Tensor:
    """Gradient of `gemm` to x, `dy W`: [..., o], [o, i] -> [..., i]."""
    if dy.dim() <= 2:
        return torch.matmul(dy, weight)
    return torch.mm(dy.flatten(0, -2), weight).view(*dy.shape[:-1], weight.shape[1])


@kernel
def dgemm_weight(dy: Tensor, x: Tensor, into: Tensor | None = None) -> Tensor:
    """Gradient of `gemm` to the weight, `dyᵀ x` over all rows: [..., o], [..., i] -> [o, i]; zeros for no rows.

    Adds it to `into` and returns that, if it is given and has dy's dtype.
    """
    if dy.dim() == 1:
        dy, x = dy.unsqueeze(0), x.unsqueeze(0)
    elif dy.dim() > 2:
        dy, x = dy.flatten(0, -2), x.flatten(0, -2)
    if into is None or into.dtype is not dy.dtype:
        return torch.mm(dy.t(), x)
    return into.addmm_(dy.t(), x)
