"""Matrix products with what follows them: a bias, a residual, a scale; forward and backward.

i, o: features in and out; `...`: any leading dimensions, or none. All tensors of a call have one dtype, and the results
are in fresh memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusible.kernels.registry import kernel


def _rows(x: Tensor) -> Tensor:
    """[..., k] -> [n, k]."""
    return x.flatten(0, -2) if x.dim() > 2 else x if x.dim() == 2 else x.unsqueeze(0)


@kernel
def gemm_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x Wᵀ + b`: [..., i], [o, i], [o] -> [..., o]."""
    return linear(x, weight, bias)


@kernel
def gemm_add(x: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor) -> Tensor:
    """`x Wᵀ + b + extra`; without a bias the product is accumulated onto a copy of extra: [..., o]."""
    if bias is not None:
        return linear(x, weight, bias).add_(extra)
    return torch.addmm(_rows(extra), _rows(x), weight.t()).view(extra.shape)


@kernel
def gemm_scale(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """`scale x Wᵀ`, the scale applied inside the product."""
    unread = x.new_empty(1)  # beta=0: it gives the dtype and no value
    y = torch.addmm(unread, _rows(x), weight.t(), beta=0, alpha=scale)
    return y.view(*x.shape[:-1], weight.shape[0])


@kernel
def gemm_scale_add(x: Tensor, weight: Tensor, scale: float, extra: Tensor) -> Tensor:
    """`scale x Wᵀ + extra`, accumulated onto a copy of extra."""
    return torch.addmm(_rows(extra), _rows(x), weight.t(), alpha=scale).view(extra.shape)


@kernel
def dgemm_x_add(dy: Tensor, weight: Tensor, extra: Tensor) -> Tensor:
    """`dy W + extra`: the gradient of a linear layer to x, accumulated onto a copy of another branch's: [..., i]."""
    return torch.addmm(_rows(extra), _rows(dy), weight).view(extra.shape)
