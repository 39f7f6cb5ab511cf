"""Two linear layers over one input: two GEMMs into the two halves of one result, and their gradients.

i, h: features in, and out of each layer; `...`: any leading dimensions, or none. All tensors of a call have one dtype,
and the results are in fresh memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.kernels.registry import kernel


def rows(x: Tensor) -> Tensor:
    """[..., k] -> [n, k]."""
    return x.flatten(0, -2) if x.dim() > 2 else x if x.dim() == 2 else x.unsqueeze(0)


def write_pair(x: Tensor, first: Tensor, second: Tensor, y: Tensor) -> Tensor:
    """Writes both products into the halves of y [..., 2h]."""
    h = first.shape[0]
    flat_x, flat_y = rows(x), rows(y)
    torch.mm(flat_x, first.t(), out=flat_y[:, :h])
    torch.mm(flat_x, second.t(), out=flat_y[:, h:])
    return y


@kernel
def gemm_pair(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """`[x Aᵀ, x Bᵀ]` side by side: [..., i], [h, i], [h, i] -> [..., 2h]."""
    return write_pair(x, first, second, x.new_empty((*x.shape[:-1], 2 * first.shape[0])))


@kernel
def dgemm_pair_x(dy: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Gradient of `gemm_pair` to x, `da A + db B`, the second product accumulated onto the first: [..., i]."""
    h, i = first.shape
    flat = rows(dy)
    dx = torch.mm(flat[:, :h], first)
    return dx.addmm_(flat[:, h:], second).view(*dy.shape[:-1], i)


@kernel
def dgemm_pair_weights(
    dy: Tensor, x: Tensor, want_first: bool = True, want_second: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `gemm_pair` to its weights, `daᵀ x` and `dbᵀ x` over all rows; `None` for one that is not wanted."""
    flat, flat_x = rows(dy), rows(x)
    h = flat.shape[1] // 2
    return (
        torch.mm(flat[:, :h].t(), flat_x) if want_first else None,
        torch.mm(flat[:, h:].t(), flat_x) if want_second else None,
    )
