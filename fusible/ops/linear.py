"""Linear layers: `Linear`, and the two ops that it stands for in a chain, `BasicLinear` and `Bias`.

i, o: features in and out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible import kernels
from fusible.op import NOWHERE, Env, Grads, Into, Op, Out, Saved, Spec, reads_for, view
from fusible.ops._checks import arithmetic, shown, trailing

__all__ = ["BasicLinear", "Bias", "Linear"]


def compute_dtype(x: torch.dtype, weight: torch.dtype, autocast: torch.dtype | None) -> torch.dtype:
    """Autocast's dtype, unless float64 takes part, which autocast leaves alone; else the weight's."""
    return weight if autocast is None or torch.float64 in (x, weight) else autocast


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The formula of all linear ops, under whatever autocast is on."""
    kind = x.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    dtype = compute_dtype(x.dtype, weight.dtype, autocast)
    bias = None if bias is None else bias.to(dtype)
    if autocast in (None, dtype):
        return F.linear(x.to(dtype), weight.to(dtype), bias)
    with torch.autocast(kind, enabled=False):
        return F.linear(x.to(dtype), weight.to(dtype), bias)


class Linear(Op, torch.nn.Linear):
    """`y = x Wᵀ + b`: [..., i] -> [..., o]. `torch.nn.Linear`, as an op.

    In a chain it stands for `BasicLinear` and, unless `bias=False`, `Bias`, which borrow its parameters.

    y has autocast's dtype if autocast is on, else the weight's; a floating x of another dtype is converted. Raises
    `ValueError` if x's last dimension is not `in_features`, and on integer or complex x.
    """

    aliases = False

    def __init__(self, *args: Any, accumulate_into_main_grad: bool = False, **kwargs: Any) -> None:
        self.accumulate_into_main_grad = accumulate_into_main_grad
        super().__init__(*args, **kwargs)

    def reference(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return plain_linear(x, weight, bias)

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        return _infer(x, self.weight, autocast)

    def expand(self) -> tuple[Op, ...]:
        return view(BasicLinear, self), view(Bias, self)


class BasicLinear(Op):
    """`y = x Wᵀ`: [..., i] -> [..., o]; the weight [o, i] is initialised as that of `torch.nn.Linear`.

    y has autocast's dtype if autocast is on, else the weight's; a floating x of another dtype is converted. The record
    holds x in the dtype of the product. Raises `ValueError` if x's last dimension is not `in_features`, and on integer
    or complex x.
    """

    aliases = False
    grad_aliases = False
    repeats = True

    class Saved(Saved):
        x: Tensor = reads_for("weight")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        super().__init__()
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.in_features = in_features
        self.out_features = out_features
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def reference(self, x: Tensor, weight: Tensor) -> Tensor:
        return plain_linear(x, weight, None)

    def fwd(self, x: Tensor, weight: Tensor, *, env: Env) -> Out:
        dtype = env.out_dtype
        if x.dtype is not dtype:
            x = x.to(dtype)
        if weight.dtype is not dtype:
            weight = weight.to(dtype)
        return Out(kernels.gemm(x, weight), saved=BasicLinear.Saved(x))

    def remember(self, x: Tensor, dtype: torch.dtype) -> Any:
        return BasicLinear.Saved(x if x.dtype is dtype else x.to(dtype))

    def bwd(
        self, saved: Saved, dy: Tensor, weight: Tensor = reads_for("x"), *, env: Env, into: Into = NOWHERE
    ) -> Grads:
        dw = kernels.dgemm_weight(dy, saved.x, into.get("weight")) if env.needs.weight else None
        if not env.needs.x:
            return Grads(None, weight=dw)
        if weight.dtype is not dy.dtype:
            weight = weight.to(dy.dtype)
        return Grads(kernels.dgemm_x(dy, weight), weight=dw)

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        return _infer(x, self.weight, autocast)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _infer(x: Spec, weight: Tensor, autocast: torch.dtype | None) -> Spec:
    arithmetic(x)
    out_features, in_features = weight.shape
    if x.width != in_features:
        raise ValueError(f"weight takes {in_features} features but x's last dimension is {x.width} {shown(x)}")
    return Spec((*x.shape[:-1], out_features), compute_dtype(x.dtype, weight.dtype, autocast), x.device)


class Bias(Op):
    """`y = x + b`: [..., n] -> [..., n]; the bias [n] starts at zero.

    y has x's dtype. Raises `ValueError` if x's last dimension is not `size`, and on integer or complex x.
    """

    aliases = False
    grad_aliases = False
    repeats = True

    def __init__(
        self,
        size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        super().__init__()
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.size = size
        self.bias = torch.nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.bias)

    def reference(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return x if bias is None else x + bias.to(x.dtype)

    def fwd(self, x: Tensor, bias: Tensor) -> Out:
        if bias.dtype is not x.dtype:
            bias = bias.to(x.dtype)
        return Out(kernels.add(x, bias))

    def bwd(self, saved: Saved, dy: Tensor, bias: None = reads_for(), *, env: Env) -> Grads:
        return Grads(dy, bias=kernels.dbias(dy) if env.needs.bias else None)

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        return trailing(x, self.bias.shape, "bias")

    def is_identity(self) -> bool:
        return self.bias is None

    def extra_repr(self) -> str:
        return f"size={self.size}"
