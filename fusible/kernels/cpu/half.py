"""Matrix products of bfloat16 and float16 where the CPU has no arithmetic for them: by panels, in float32, rounded
once.

Plain PyTorch computes such products element by element there, many times slower than float32's.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fusible._torch import cpu_capabilities
from fusible.kernels import epilogue, linear
from fusible.kernels.library import load, operators

#: Rows that are converted at a time: large enough for a GEMM, small enough for the cache.
PANEL = 512


@functools.cache
def _native(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies in this dtype itself."""
    found = cpu_capabilities()
    names = ("avx512_bf16", "amx_bf16", "bf16") if dtype is torch.bfloat16 else ("avx512_fp16", "amx_fp16", "fp16")
    return any(found.get(name) for name in names)


def _applies(device: str, dtype: torch.dtype, width: int) -> bool:
    return device == "cpu" and dtype in (torch.bfloat16, torch.float16) and not _native(dtype) and load()


def _rows(x: Tensor) -> Tensor:
    """[..., k] -> [n, k]."""
    return x.flatten(0, -2) if x.dim() > 2 else x if x.dim() == 2 else x.unsqueeze(0)


def _product(x: Tensor, wide_weight: Tensor, add: Tensor | None = None, extra: Tensor | None = None) -> Tensor:
    """`x W + add + extra` for a float32 W [i, o], add [o] in float32 and extra of x's dtype: [..., i] -> [..., o]."""
    y = operators.empty([*x.shape[:-1], wide_weight.shape[1]], x.dtype)
    rows, out = _rows(x), _rows(y)
    others = None if extra is None else _rows(extra)
    for start in range(0, rows.shape[0], PANEL):
        panel = rows[start : start + PANEL].float()
        product = panel @ wide_weight if add is None else torch.addmm(add, panel, wide_weight)
        if others is not None:
            product += others[start : start + PANEL]
        out[start : start + PANEL].copy_(product)
    return y


@linear.gemm.backend("cpu", _applies)
def gemm(x: Tensor, weight: Tensor) -> Tensor:
    return _product(x, weight.float().t())


@linear.dgemm_x.backend("cpu", _applies)
def dgemm_x(dy: Tensor, weight: Tensor) -> Tensor:
    return _product(dy, weight.float())


@linear.dgemm_weight.backend("cpu", _applies)
def dgemm_weight(dy: Tensor, x: Tensor, into: Tensor | None = None) -> Tensor:
    d_rows, x_rows = _rows(dy), _rows(x)
    direct = into if into is not None and into.dtype is torch.float32 else None
    total = torch.zeros(d_rows.shape[1], x_rows.shape[1]) if direct is None else direct
    for start in range(0, x_rows.shape[0], PANEL):
        total.addmm_(d_rows[start : start + PANEL].float().t(), x_rows[start : start + PANEL].float())
    return total.to(dy.dtype) if direct is None else direct


@epilogue.gemm_bias.backend("cpu", _applies)
def gemm_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _product(x, weight.float().t(), bias.float())


@epilogue.gemm_add.backend("cpu", _applies)
def gemm_add(x: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor) -> Tensor:
    return _product(x, weight.float().t(), None if bias is None else bias.float(), extra)


@epilogue.dgemm_x_add.backend("cpu", _applies)
def dgemm_x_add(dy: Tensor, weight: Tensor, extra: Tensor) -> Tensor:
    return _product(dy, weight.float(), None, extra)
