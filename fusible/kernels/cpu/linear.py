"""Matrix products by torch's GEMMs, written into memory of ours where the result is large."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.kernels import epilogue, linear
from fusible.kernels.library import load, operators

#: Elements from which a result comes from the caching allocator, and `out=` is worth its cost.
LARGE = 1 << 18


def _applies(device: str, dtype: torch.dtype, width: int) -> bool:
    return device == "cpu" and dtype in (torch.float32, torch.float64) and load()


def _rows(x: Tensor) -> Tensor:
    """[..., k] -> [n, k]."""
    return x.flatten(0, -2) if x.dim() > 2 else x if x.dim() == 2 else x.unsqueeze(0)


def _result(x: Tensor, width: int) -> Tensor:
    """Fresh memory for x's leading dimensions and `width`."""
    return operators.empty([*x.shape[:-1], width], x.dtype)


def _large(x: Tensor, width: int, out: int) -> bool:
    """Whether x [..., width] gives a large result [..., out]."""
    return x.numel() * out >= LARGE * (width or 1)


@linear.gemm.backend("cpu", _applies)
def gemm(x: Tensor, weight: Tensor) -> Tensor:
    out, width = weight.shape
    if not _large(x, width, out):
        return torch.nn.functional.linear(x, weight)
    y = _result(x, out)
    torch.mm(_rows(x), weight.t(), out=_rows(y))
    return y


@linear.dgemm_x.backend("cpu", _applies)
def dgemm_x(dy: Tensor, weight: Tensor) -> Tensor:
    width, out = weight.shape
    if not _large(dy, width, out):
        return torch.matmul(dy, weight)
    dx = _result(dy, out)
    torch.mm(_rows(dy), weight, out=_rows(dx))
    return dx


@linear.dgemm_weight.backend("cpu", _applies)
def dgemm_weight(dy: Tensor, x: Tensor, into: Tensor | None = None) -> Tensor:
    dw_shape = [dy.shape[-1], x.shape[-1]]
    if into is not None or dw_shape[0] * dw_shape[1] < LARGE:
        return linear.dgemm_weight.body(dy, x, into)
    dw = operators.empty(dw_shape, dy.dtype)
    return torch.mm(_rows(dy).t(), _rows(x), out=dw)


@epilogue.gemm_bias.backend("cpu", _applies)
def gemm_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out, width = weight.shape
    if not _large(x, width, out):
        return torch.nn.functional.linear(x, weight, bias)
    y = _result(x, out)
    torch.addmm(bias, _rows(x), weight.t(), out=_rows(y))
    return y


@epilogue.gemm_add.backend("cpu", _applies)
def gemm_add(x: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor) -> Tensor:
    out, width = weight.shape
    if not _large(x, width, out):
        return epilogue.gemm_add.body(x, weight, bias, extra)
    y = _result(x, out)
    if bias is None:
        torch.addmm(_rows(extra), _rows(x), weight.t(), out=_rows(y))
        return y
    torch.addmm(bias, _rows(x), weight.t(), out=_rows(y))
    return y.add_(extra)


@epilogue.dgemm_x_add.backend("cpu", _applies)
def dgemm_x_add(dy: Tensor, weight: Tensor, extra: Tensor) -> Tensor:
    width, out = weight.shape
    if not _large(dy, width, out):
        return epilogue.dgemm_x_add.body(dy, weight, extra)
    dx = _result(dy, out)
    torch.addmm(_rows(extra), _rows(dy), weight, out=_rows(dx))
    return dx
