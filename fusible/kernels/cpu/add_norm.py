"""Norms with what is around them in one pass over the rows; see csrc/norm.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.kernels import add_norm
from fusible.kernels.dropout import new_seed
from fusible.kernels.library import applies, operators


@add_norm.add_rms_norm.backend("cpu", applies)
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    normalized_ndim: int = 1,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    y, _, rstd, total = operators.norm(x, residual, weight, None, eps, normalized_ndim, zero_centered, False, True)
    return y, rstd, total


@add_norm.drms_norm_add.backend("cpu", applies)
def drms_norm_add(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    extra: Tensor,
    zero_centered: bool = False,
    want_weight: bool = True,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor | None]:
    dx, dweight, _ = operators.dnorm(
        dy, x, None, rstd, weight, extra, normalized_ndim, zero_centered, True, True, want_weight, False
    )
    return dx, dweight if want_weight else None


@add_norm.add_layer_norm.backend("cpu", applies)
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_ndim: int = 1,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return operators.norm(x, residual, weight, bias, eps, normalized_ndim, zero_centered, True, True)


@add_norm.dlayer_norm_add.backend("cpu", applies)
def dlayer_norm_add(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    extra: Tensor,
    zero_centered: bool = False,
    want_weight: bool = True,
    want_bias: bool = True,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dx, dweight, dbias = operators.dnorm(
        dy, x, mean, rstd, weight, extra, normalized_ndim, zero_centered, True, True, want_weight, want_bias
    )
    return dx, dweight if want_weight else None, dbias if want_bias else None


@add_norm.dropout_add_norm.backend("cpu", applies)
def dropout_add_norm(
    x: Tensor,
    residual: Tensor,
    p: float,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_ndim: int = 1,
    zero_centered: bool = False,
    center: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    seed = new_seed()
    y, mean, rstd, total = operators.dropout_add_norm(
        x, residual, seed, 1 / (1 - p), weight, bias, eps, normalized_ndim, zero_centered, center
    )
    return y, mean if center else None, rstd, total, seed


@add_norm.ddropout_add_norm.backend("cpu", applies)
def ddropout_add_norm(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    extra: Tensor | None,
    mask: Tensor,
    scale: float,
    zero_centered: bool = False,
    want_weight: bool = True,
    want_bias: bool = True,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    if mask.dtype is torch.bool:
        arguments = dy, x, mean, rstd, weight, extra, mask, scale, zero_centered, want_weight, want_bias
        return add_norm.ddropout_add_norm.body(*arguments, normalized_ndim)
    dropped, dx, dweight, dbias = operators.ddropout_add_norm(
        dy, x, mean, rstd, weight, extra, mask, scale, normalized_ndim, zero_centered, want_weight, want_bias
    )
    return dropped, dx, dweight if want_weight else None, dbias if want_bias else None


@add_norm.dnorm_recompute.backend("cpu", applies)
def dnorm_recompute(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    extra: Tensor | None,
    zero_centered: bool = False,
    want_weight: bool = True,
    want_bias: bool = True,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    dx, dweight, dbias, y = operators.dnorm_recompute(
        dy, x, mean, rstd, weight, bias, extra, normalized_ndim, zero_centered, want_weight, want_bias
    )
    return dx, dweight if want_weight else None, dbias if want_bias else None, y
