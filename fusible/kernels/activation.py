"""Pointwise activations, alone and with the bias before them.

Each activation `f` has three kernels: `f(x)`, `f_(x)` which writes over x and returns it (for intermediates of our own
only), and `df(dy, record)`. The record is x, or the output y where y is enough (relu, sigmoid, tanh). All have the
shape and dtype of x.

The last kernels take the name of an activation, `act`, and GELU's `approximate`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible._torch import gelu_ as _gelu_
from fusible._torch import silu as _silu
from fusible._torch import silu_ as _silu_
from fusible.kernels._dtype import to, wide
from fusible.kernels.registry import kernel

_gelu_backward = torch.ops.aten.gelu_backward.default
_sigmoid_backward = torch.ops.aten.sigmoid_backward.default
_silu_backward = torch.ops.aten.silu_backward.default
_tanh_backward = torch.ops.aten.tanh_backward.default
_threshold_backward = torch.ops.aten.threshold_backward.default

#: The factor in QGELU.
QUICK = 1.702

#: Up to this many elements torch's own loop beats oneDNN, whose calls cost 5 to 15 us more.
_SMALL = 1 << 13


def _around_onednn(x: Tensor, approximate: str) -> bool:
    """Whether to go through a transposed view, which torch does not hand to oneDNN."""
    return approximate == "none" and x.dim() > 1 and x.numel() <= _SMALL


def dswish(dy: Tensor, x: Tensor, alpha: float) -> Tensor:
    """Gradient of `x sigmoid(alpha x)`. Not written by `silu'(alpha x)`, where `alpha x` may overflow."""
    s = (x * alpha).sigmoid_()
    return _sigmoid_backward(dy * x, s).mul_(alpha).addcmul_(dy, s)


@kernel
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """`x Φ(x)`, or its tanh approximation."""
    if _around_onednn(x, approximate):
        return F.gelu(x.mT, approximate=approximate).mT
    return F.gelu(x, approximate=approximate)


@kernel
def gelu_(x: Tensor, approximate: str = "none") -> Tensor:
    """`gelu` in place."""
    if _around_onednn(x, approximate):
        _gelu_(x.mT, approximate=approximate)
        return x
    return _gelu_(x, approximate=approximate)


@kernel
def dgelu(dy: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    """`dy (Φ(x) + x φ(x))`, or the derivative of the tanh approximation."""
    if _around_onednn(x, approximate):
        return _gelu_backward(dy.mT, x.mT, approximate=approximate).mT
    return _gelu_backward(dy, x, approximate=approximate)


@kernel
def qgelu(x: Tensor) -> Tensor:
    """`x sigmoid(1.702 x)`."""
    return (x * QUICK).sigmoid_().mul_(x)


@kernel
def qgelu_(x: Tensor) -> Tensor:
    """`qgelu` in place."""
    return x.mul_((x * QUICK).sigmoid_())


@kernel
def dqgelu(dy: Tensor, x: Tensor) -> Tensor:
    """`dy (s + 1.702 x s (1 - s))` with `s = sigmoid(1.702 x)`; in float32 at least."""
    dtype = wide(x.dtype)
    return to(dswish(to(dy, dtype), to(x, dtype), QUICK), x.dtype)


@kernel
def relu(x: Tensor) -> Tensor:
    """`max(x, 0)`."""
    return torch.relu(x)


@kernel
def relu_(x: Tensor) -> Tensor:
    """`relu` in place."""
    return torch.relu_(x)


@kernel
def drelu(dy: Tensor, y: Tensor) -> Tensor:
    """`dy` where `y > 0`, else 0."""
    return _threshold_backward(dy, y, 0)


@kernel
def srelu(x: Tensor) -> Tensor:
    """`max(x, 0)²`."""
    y = torch.relu(x)
    return y.mul_(y)


@kernel
def srelu_(x: Tensor) -> Tensor:
    """`srelu` in place."""
    y = torch.relu_(x)
    return y.mul_(y)


@kernel
def dsrelu(dy: Tensor, x: Tensor) -> Tensor:
    """`2 max(x, 0) dy`."""
    return _threshold_backward(dy, x, 0).mul_(torch.relu(x)).mul_(2)


@kernel
def silu(x: Tensor) -> Tensor:
    """`x sigmoid(x)`."""
    return _silu(x)


@kernel
def silu_(x: Tensor) -> Tensor:
    """`silu` in place."""
    return _silu_(x)


@kernel
def dsilu(dy: Tensor, x: Tensor) -> Tensor:
    """`dy s (1 + x (1 - s))` with `s = sigmoid(x)`."""
    return _silu_backward(dy, x)


@kernel
def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + exp(-x))`."""
    return torch.sigmoid(x)


@kernel
def sigmoid_(x: Tensor) -> Tensor:
    """`sigmoid` in place."""
    return torch.sigmoid_(x)


@kernel
def dsigmoid(dy: Tensor, y: Tensor) -> Tensor:
    """`dy y (1 - y)`."""
    return _sigmoid_backward(dy, y)


@kernel
def tanh(x: Tensor) -> Tensor:
    """`tanh(x)`."""
    return torch.tanh(x)


@kernel
def tanh_(x: Tensor) -> Tensor:
    """`tanh` in place."""
    return torch.tanh_(x)


@kernel
def dtanh(dy: Tensor, y: Tensor) -> Tensor:
    """`dy (1 - y²)`."""
    return _tanh_backward(dy, y)


@kernel
def dbias(dx: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Gradient of a bias: the sum of dx over all leading dimensions, in dx's dtype or in `dtype`: [..., n] -> [n].

    Fresh memory, also for rank 1; zeros for no rows. Summed in at least float32 (torch's sum does so by itself).
    """
    if dx.dim() == 1:
        return dx.to(dtype or dx.dtype, copy=True)
    rows = tuple(range(dx.dim() - 1))
    if dtype is None or dtype is dx.dtype:
        return dx.sum(rows)
    return dx.sum(rows, dtype=torch.promote_types(dx.dtype, dtype)).to(dtype)


#: Forward, in place and backward.
ACTIVATIONS = {
    "gelu": (gelu, gelu_, dgelu),
    "qgelu": (qgelu, qgelu_, dqgelu),
    "relu": (relu, relu_, drelu),
    "sigmoid": (sigmoid, sigmoid_, dsigmoid),
    "silu": (silu, silu_, dsilu),
    "srelu": (srelu, srelu_, dsrelu),
    "tanh": (tanh, tanh_, dtanh),
}


def _options(act: str, approximate: str) -> tuple[str, ...]:
    return (approximate,) if act == "gelu" else ()


@kernel
def bias_act(
    x: Tensor, bias: Tensor, act: str, approximate: str = "none", keep: bool = True
) -> tuple[Tensor, Tensor | None]:
    """`y = act(pre)` with `pre = x + bias`. Returns (y, pre), both in x's dtype, or (y, None) unless `keep`."""
    pre = to(x + bias, x.dtype)
    y = ACTIVATIONS[act][0 if keep else 1].body(pre, *_options(act, approximate))
    return y, pre if keep else None


@kernel
def bias_act_(
    x: Tensor, bias: Tensor, act: str, approximate: str = "none", keep: bool = True
) -> tuple[Tensor, Tensor | None]:
    """`bias_act` that writes pre, or unless `keep` y, over x, an intermediate of our own."""
    x.add_(bias)
    y = ACTIVATIONS[act][0 if keep else 1].body(x, *_options(act, approximate))
    return y, x if keep else None


@kernel
def dact_dbias(
    dy: Tensor, record: Tensor, act: str, approximate: str = "none", dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Gradient of an activation, and its sum over the leading dimensions (`dbias`). Returns (dx, dbias)."""
    dx = ACTIVATIONS[act][2].body(dy, record, *_options(act, approximate))
    return dx, dbias.body(dx, dtype)


@kernel
def dact_recompute(dy: Tensor, x: Tensor, act: str, approximate: str = "none") -> tuple[Tensor, Tensor]:
    """Gradient and output of an activation that keeps x (not relu, sigmoid, tanh). Returns (dx, y)."""
    forward, _, backward = ACTIVATIONS[act]
    options = _options(act, approximate)
    return backward.body(dy, x, *options), forward.body(x, *options)


@kernel
def dact_dbias_recompute(
    dy: Tensor, x: Tensor, act: str, approximate: str = "none", dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`dact_dbias` and the output of an activation that keeps x. Returns (dx, dbias, y)."""
    dx, y = dact_recompute.body(dy, x, act, approximate)
    return dx, dbias.body(dx, dtype), y
