"""Gated activations: half of the last dimension, `a`, gates the other half, `b`.

With `gate_first` the gate is the first half. With `interleave=k` the two alternate in blocks of k. x: [..., 2h], y and
dy: [..., h], all of one dtype. A new one is two kernels of one line each and, if it is no product `act(a) b`, its
partial derivatives.

The last kernels take the name of one, `act`, and after the layout its own options, in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible._torch import silu as _silu
from fusible.kernels._dtype import to, wide
from fusible.kernels.activation import dbias, dqgelu, dswish, qgelu
from fusible.kernels.registry import kernel

_gelu_backward = torch.ops.aten.gelu_backward.grad_input
_glu_backward = torch.ops.aten.glu_backward.default
_silu_backward = torch.ops.aten.silu_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_threshold_backward = torch.ops.aten.threshold_backward.grad_input

Formula = Callable[[Tensor, Tensor], Tensor]
"""(a, b) -> y"""
Partials = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(dy, a, b, da, db), which writes da and db"""


def _halves(x: Tensor, gate_first: bool, interleave: int | None) -> tuple[Tensor, Tensor]:
    """The gate and the rest, as views: [..., h], or [..., h / k, k] if interleaved."""
    if interleave is None:
        first, second = x.chunk(2, -1)
    else:
        first, second = x.unflatten(-1, (-1, 2, interleave)).unbind(-2)
    return (first, second) if gate_first else (second, first)


def _forward(x: Tensor, gate_first: bool, interleave: int | None, formula: Formula) -> Tensor:
    y = formula(*_halves(x, gate_first, interleave))
    return y if interleave is None else y.flatten(-2)


def _backward(dy: Tensor, x: Tensor, gate_first: bool, interleave: int | None, partials: Partials) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if interleave is not None:
        dy = dy.unflatten(-1, (-1, interleave))
    partials(dy, *_halves(x, gate_first, interleave), *_halves(dx, gate_first, interleave))
    return dx


def _product(act: Callable[[Tensor], Tensor]) -> Formula:
    """`act(a) b`; `act` returns fresh memory."""
    return lambda a, b: act(a).mul_(b)


def _dproduct(act: Callable[[Tensor], Tensor], dact: Callable[[Tensor, Tensor, Tensor], object]) -> Partials:
    """Gradients of `act(a) b`; `dact(d, a, out)` writes `d act'(a)`."""

    def partials(dy: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor) -> None:
        torch.mul(dy, act(a), out=db)
        dact(dy * b, a, da)

    return partials


def _dsilu(d: Tensor, a: Tensor, out: Tensor) -> None:
    _silu_backward(d, a, grad_input=out)


_swiglu, _dswiglu = _product(_silu), _dproduct(_silu, _dsilu)


@kernel
def swiglu(x: Tensor, gate_first: bool = True, interleave: int | None = None) -> Tensor:
    """`silu(a) b`."""
    return _forward(x, gate_first, interleave, _swiglu)


@kernel
def dswiglu(dy: Tensor, x: Tensor, gate_first: bool = True, interleave: int | None = None) -> Tensor:
    """`da = dy b silu'(a)`, `db = dy silu(a)`."""
    return _backward(dy, x, gate_first, interleave, _dswiglu)


@kernel
def geglu(x: Tensor, gate_first: bool = True, interleave: int | None = None, approximate: str = "none") -> Tensor:
    """`gelu(a) b`."""
    return _forward(x, gate_first, interleave, _product(lambda a: F.gelu(a, approximate=approximate)))


@kernel
def dgeglu(
    dy: Tensor, x: Tensor, gate_first: bool = True, interleave: int | None = None, approximate: str = "none"
) -> Tensor:
    """`da = dy b gelu'(a)`, `db = dy gelu(a)`."""

    def dact(d: Tensor, a: Tensor, out: Tensor) -> None:
        _gelu_backward(d, a, approximate=approximate, grad_input=out)

    return _backward(dy, x, gate_first, interleave, _dproduct(lambda a: F.gelu(a, approximate=approximate), dact))


def _dqgelu(d: Tensor, a: Tensor, out: Tensor) -> None:
    out.copy_(dqgelu.body(d, a))


_qgeglu, _dqgeglu = _product(qgelu.body), _dproduct(qgelu.body, _dqgelu)


@kernel
def qgeglu(x: Tensor, gate_first: bool = True, interleave: int | None = None) -> Tensor:
    """`a sigmoid(1.702 a) b`."""
    return _forward(x, gate_first, interleave, _qgeglu)


@kernel
def dqgeglu(dy: Tensor, x: Tensor, gate_first: bool = True, interleave: int | None = None) -> Tensor:
    """`da = dy b qgelu'(a)`, `db = dy qgelu(a)`."""
    return _backward(dy, x, gate_first, interleave, _dqgeglu)


def _drelu(d: Tensor, a: Tensor, out: Tensor) -> None:
    _threshold_backward(d, a, 0, grad_input=out)


_reglu, _dreglu = _product(torch.relu), _dproduct(torch.relu, _drelu)


@kernel
def reglu(x: Tensor, gate_first: bool = True, interleave: int | None = None) -> Tensor:
    """`max(a, 0) b`."""
    return _forward(x, gate_first, interleave, _reglu)


@kernel
def dreglu(dy: Tensor, x: Tensor, gate_first: bool = True, interleave: int | None = None) -> Tensor:
    """`da = dy b` where `a > 0`, else 0; `db = dy max(a, 0)`."""
    return _backward(dy, x, gate_first, interleave, _dreglu)


def _srelu(a: Tensor) -> Tensor:
    y = torch.relu(a)
    return y.mul_(y)


def _dsrelu(d: Tensor, a: Tensor, out: Tensor) -> None:
    _threshold_backward(d, a, 0, grad_input=out).mul_(torch.relu(a)).mul_(2)


_sreglu, _dsreglu = _product(_srelu), _dproduct(_srelu, _dsrelu)


@kernel
def sreglu(x: Tensor, gate_first: bool = True, interleave: int | None = None) -> Tensor:
    """`max(a, 0)² b`."""
    return _forward(x, gate_first, interleave, _sreglu)


@kernel
def dsreglu(dy: Tensor, x: Tensor, gate_first: bool = True, interleave: int | None = None) -> Tensor:
    """`da = 2 dy b max(a, 0)`, `db = dy max(a, 0)²`."""
    return _backward(dy, x, gate_first, interleave, _dsreglu)


@kernel
def glu(x: Tensor) -> Tensor:
    """`a sigmoid(b)` with a the first half, as `torch.nn.GLU`."""
    return F.glu(x, -1)


@kernel
def dglu(dy: Tensor, x: Tensor) -> Tensor:
    """`da = dy sigmoid(b)`, `db = dy a sigmoid'(b)`."""
    return _glu_backward(dy, x, -1)


@kernel
def clamped_swiglu(
    x: Tensor,
    gate_first: bool = True,
    interleave: int | None = None,
    limit: float = 7.0,
    alpha: float = 1.702,
    offset: float = 1.0,
) -> Tensor:
    """`a' sigmoid(alpha a') b'` with `a' = min(a, limit)` and `b' = clamp(b, ±limit) + offset`; in float32 at least."""

    def formula(a: Tensor, b: Tensor) -> Tensor:
        a = a.clamp(max=limit)
        return (a * alpha).sigmoid_().mul_(a).mul_(b.clamp(-limit, limit).add_(offset))

    return to(_forward(to(x, wide(x.dtype)), gate_first, interleave, formula), x.dtype)


@kernel
def dclamped_swiglu(
    dy: Tensor,
    x: Tensor,
    gate_first: bool = True,
    interleave: int | None = None,
    limit: float = 7.0,
    alpha: float = 1.702,
    offset: float = 1.0,
) -> Tensor:
    """With `s = sigmoid(alpha a')`: `da = dy b' (s + alpha a' s (1 - s))` where `a <= limit`, else 0;

    `db = dy a' s` where `|b| <= limit`, else 0.
    """

    def partials(dy: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor) -> None:
        clamped = a.clamp(max=limit)
        torch.mul(dy, (clamped * alpha).sigmoid_().mul_(clamped), out=db)
        db.masked_fill_((b.abs() <= limit).logical_not_(), 0)
        da.copy_(dswish(b.clamp(-limit, limit).add_(offset).mul_(dy), clamped, alpha))
        da.masked_fill_((a <= limit).logical_not_(), 0)

    dtype = wide(x.dtype)
    return to(_backward(to(dy, dtype), to(x, dtype), gate_first, interleave, partials), x.dtype)


@kernel
def situ_glu(
    x: Tensor, gate_first: bool = True, interleave: int | None = None, beta1: float = 4.0, beta2: float = 25.0
) -> Tensor:
    """`beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2)`; in float32 at least."""

    def formula(a: Tensor, b: Tensor) -> Tensor:
        gate = (a / beta1).tanh_().mul_(beta1).mul_(torch.sigmoid(a))
        return gate.mul_((b / beta2).tanh_().mul_(beta2))

    return to(_forward(to(x, wide(x.dtype)), gate_first, interleave, formula), x.dtype)


@kernel
def dsitu_glu(
    dy: Tensor,
    x: Tensor,
    gate_first: bool = True,
    interleave: int | None = None,
    beta1: float = 4.0,
    beta2: float = 25.0,
) -> Tensor:
    """With `t = tanh(a / beta1)`, `u = tanh(b / beta2)`, `s = sigmoid(a)`:

    `da = dy beta2 u s (1 - t² + beta1 t (1 - s))`, `db = dy beta1 t s (1 - u²)`.
    """

    def partials(dy: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor) -> None:
        t, u, s = (a / beta1).tanh_(), (b / beta2).tanh_(), torch.sigmoid(a)
        _tanh_backward((t * beta1).mul_(s).mul_(dy), u, grad_input=db)
        _tanh_backward(s, t, grad_input=da)
        da.add_(torch.sub(1, s).mul_(s).mul_(t).mul_(beta1)).mul_(u.mul_(beta2)).mul_(dy)

    dtype = wide(x.dtype)
    return to(_backward(to(dy, dtype), to(x, dtype), gate_first, interleave, partials), x.dtype)


#: Forward and backward.
GATED = {
    "clamped_swiglu": (clamped_swiglu, dclamped_swiglu),
    "geglu": (geglu, dgeglu),
    "glu": (glu, dglu),
    "qgeglu": (qgeglu, dqgeglu),
    "reglu": (reglu, dreglu),
    "situ_glu": (situ_glu, dsitu_glu),
    "sreglu": (sreglu, dsreglu),
    "swiglu": (swiglu, dswiglu),
}


def _arguments(act: str, gate_first: bool, interleave: int | None, options: tuple[Any, ...]) -> tuple[Any, ...]:
    return () if act == "glu" else (gate_first, interleave, *options)


@kernel
def bias_gated(
    x: Tensor, bias: Tensor, act: str, gate_first: bool = True, interleave: int | None = None, *options: Any
) -> tuple[Tensor, Tensor]:
    """`y = act(pre)` with `pre = x + bias`. Returns (y, pre), both in x's dtype."""
    pre = to(x + bias, x.dtype)
    return GATED[act][0].body(pre, *_arguments(act, gate_first, interleave, options)), pre


@kernel
def bias_gated_(
    x: Tensor, bias: Tensor, act: str, gate_first: bool = True, interleave: int | None = None, *options: Any
) -> tuple[Tensor, Tensor]:
    """`bias_gated` that writes pre over x, an intermediate of our own."""
    x.add_(bias)
    return GATED[act][0].body(x, *_arguments(act, gate_first, interleave, options)), x


@kernel
def dgated_dbias(
    dy: Tensor,
    x: Tensor,
    act: str,
    dtype: torch.dtype | None = None,
    gate_first: bool = True,
    interleave: int | None = None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Gradient of a gated activation, and its sum over the leading dimensions (`dbias`). Returns (dx, dbias)."""
    dx = GATED[act][1].body(dy, x, *_arguments(act, gate_first, interleave, options))
    return dx, dbias.body(dx, dtype)


@kernel
def dgated_recompute(
    dy: Tensor, x: Tensor, act: str, gate_first: bool = True, interleave: int | None = None, *options: Any
) -> tuple[Tensor, Tensor]:
    """Gradient of a gated activation, and its output computed again. Returns (dx, y)."""
    arguments = _arguments(act, gate_first, interleave, options)
    return GATED[act][1].body(dy, x, *arguments), GATED[act][0].body(x, *arguments)


@kernel
def dgated_dbias_recompute(
    dy: Tensor,
    x: Tensor,
    act: str,
    dtype: torch.dtype | None = None,
    gate_first: bool = True,
    interleave: int | None = None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dgated_dbias` and the output computed again. Returns (dx, dbias, y)."""
    dx, y = dgated_recompute.body(dy, x, act, gate_first, interleave, *options)
    return dx, dbias.body(dx, dtype), y
