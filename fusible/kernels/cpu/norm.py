"""Norms in one pass over the rows; see csrc/norm.cpp."""

from __future__ import annotations

from torch import Tensor

from fusible.kernels import norm
from fusible.kernels.library import applies, operators


@norm.rms_norm.backend("cpu", applies)
def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, normalized_ndim: int = 1, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    y, _, rstd, _ = operators.norm(x, None, weight, None, eps, normalized_ndim, zero_centered, False, True)
    return y, rstd


@norm.drms_norm.backend("cpu", applies)
def drms_norm(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    zero_centered: bool = False,
    want_x: bool = True,
    want_weight: bool = True,
    normalized_ndim: int = 1,
) -> tuple[Tensor | None, Tensor | None]:
    dx, dweight, _ = operators.dnorm(
        dy, x, None, rstd, weight, None, normalized_ndim, zero_centered, True, want_x, want_weight, False
    )
    return dx if want_x else None, dweight if want_weight else None


@norm.layer_norm.backend("cpu", applies)
def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_ndim: int = 1,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd, _ = operators.norm(x, None, weight, bias, eps, normalized_ndim, zero_centered, True, True)
    return y, mean, rstd


@norm.dlayer_norm.backend("cpu", applies)
def dlayer_norm(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    zero_centered: bool = False,
    want_x: bool = True,
    want_weight: bool = True,
    want_bias: bool = True,
    normalized_ndim: int = 1,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx, dweight, dbias = operators.dnorm(
        dy, x, mean, rstd, weight, None, normalized_ndim, zero_centered, True, want_x, want_weight, want_bias
    )
    return dx if want_x else None, dweight if want_weight else None, dbias if want_bias else None


@norm.l2_norm.backend("cpu", applies)
def l2_norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, _, inverse, _ = operators.norm(x, None, None, None, eps, 1, False, False, False)
    return y, inverse


@norm.dl2_norm.backend("cpu", applies)
def dl2_norm(dy: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    return operators.dnorm(dy, x, None, inverse, None, None, 1, False, False, True, False, False)[0]
