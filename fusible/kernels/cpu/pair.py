"""Two linear layers over one input: large results in memory of ours; 16-bit products as `half` makes them."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.kernels import linear, pair
from fusible.kernels.cpu.half import _applies as narrow
from fusible.kernels.cpu.linear import LARGE
from fusible.kernels.cpu.linear import _applies as wide
from fusible.kernels.library import operators
from fusible.kernels.pair import rows, write_pair


def _empty(shape: list[int], like: Tensor) -> Tensor:
    """Fresh memory, from the cache of large results where it is large."""
    elements = 1
    for size in shape:
        elements *= size
    return operators.empty(shape, like.dtype) if elements >= LARGE else like.new_empty(shape)


@pair.gemm_pair.backend("cpu", wide)
def gemm_pair(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return write_pair(x, first, second, _empty([*x.shape[:-1], 2 * first.shape[0]], x))


@pair.dgemm_pair_x.backend("cpu", wide)
def dgemm_pair_x(dy: Tensor, first: Tensor, second: Tensor) -> Tensor:
    h, i = first.shape
    flat, dx = rows(dy), _empty([*dy.shape[:-1], i], dy)
    torch.mm(flat[:, :h], first, out=rows(dx)).addmm_(flat[:, h:], second)
    return dx


@pair.dgemm_pair_weights.backend("cpu", wide)
def dgemm_pair_weights(
    dy: Tensor, x: Tensor, want_first: bool = True, want_second: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    flat, flat_x = rows(dy), rows(x)
    h, i = flat.shape[1] // 2, flat_x.shape[1]
    halves = (flat[:, :h] if want_first else None), (flat[:, h:] if want_second else None)
    da, db = (None if d is None else torch.mm(d.t(), flat_x, out=_empty([h, i], dy)) for d in halves)
    return da, db


@pair.gemm_pair.backend("cpu", narrow)
def gemm_pair_narrow(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    h = first.shape[0]
    y = operators.empty([*x.shape[:-1], 2 * h], x.dtype)
    y[..., :h] = linear.gemm(x, first)
    y[..., h:] = linear.gemm(x, second)
    return y


@pair.dgemm_pair_x.backend("cpu", narrow)
def dgemm_pair_x_narrow(dy: Tensor, first: Tensor, second: Tensor) -> Tensor:
    h = first.shape[0]
    return linear.dgemm_x(dy[..., :h], first).add_(linear.dgemm_x(dy[..., h:], second))


@pair.dgemm_pair_weights.backend("cpu", narrow)
def dgemm_pair_weights_narrow(
    dy: Tensor, x: Tensor, want_first: bool = True, want_second: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    h = dy.shape[-1] // 2
    return (
        linear.dgemm_weight(dy[..., :h], x) if want_first else None,
        linear.dgemm_weight(dy[..., h:], x) if want_second else None,
    )
