"""Gated activations: half of x's last dimension, `a`, gates the other half, `b`: [..., 2h] -> [..., h].

With `gate_first` (the default) a is the first half. With `interleave=k` the two alternate in blocks of k elements: k of
a, k of b, and so on. y has x's dtype. Raises `ValueError` if the last dimension cannot be split so, and on integer or
complex x.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible import kernels
from fusible.op import Grads, Op, Out, Saved, Spec, reads_for
from fusible.ops._checks import arithmetic, shown

__all__ = ["GEGLU", "GLU", "QGEGLU", "ClampedSwiGLU", "ReGLU", "SReGLU", "SiTUGLU", "SwiGLU"]


class _Passes(Op):
    """What rules ask of a gated activation: passes that do more than its own."""

    aliases = False
    grad_aliases = False
    repeats = True

    def remember(self, x: Tensor, dtype: torch.dtype) -> Any:
        return self.Saved(x)

    def arguments(self) -> tuple[Any, ...]:
        """Its name in `kernels.bias_gated` and its like, `gate_first`, `interleave` and its options."""
        raise NotImplementedError

    def fwd_bias(self, x: Tensor, bias: Tensor, keeps: Any) -> tuple[Tensor, Saved]:
        """The output for `x + bias`, in one pass, and its record with the fields that it `keeps`."""
        y, pre = kernels.bias_gated(x, bias, *self.arguments())
        return y, self.Saved(pre)

    def bwd_bias(self, saved: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """(dx, its sum over the leading dimensions), in one pass."""
        act, *arguments = self.arguments()
        return kernels.dgated_dbias(dy, saved.x, act, None, *arguments)

    def bwd_again(self, saved: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """(dx, the output computed again), in one pass."""
        return kernels.dgated_recompute(dy, saved.x, *self.arguments())

    def bwd_bias_again(self, saved: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(dx, its sum over the leading dimensions, the output computed again), in one pass."""
        act, *arguments = self.arguments()
        return kernels.dgated_dbias_recompute(dy, saved.x, act, None, *arguments)


class _Gated(_Passes):
    """What all but GLU share. One more needs its two kernels, a `Saved` and its `formula`; `options` if it has some."""

    kernel: ClassVar[Any]
    dkernel: ClassVar[Any]
    #: Names of the attributes that the kernels take as further arguments, in their order.
    options: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.fixed = ("gate_first", "interleave", *cls.options)

    def __init__(self, *, gate_first: bool = True, interleave: int | None = None) -> None:
        super().__init__()
        if interleave is not None and interleave < 1:
            raise ValueError(f"interleave must be a positive number of elements or None, got {interleave}")
        self.gate_first = gate_first
        self.interleave = interleave

    def formula(self, a: Tensor, b: Tensor) -> Tensor:
        raise NotImplementedError

    def reference(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (-1, 2, self.interleave or x.shape[-1] // 2))
        a, b = parts.unbind(-2) if self.gate_first else parts.flip(-2).unbind(-2)
        return self.formula(a, b).flatten(-2)

    def fwd(self, x: Tensor) -> Out:
        return Out(self.kernel(x, *self._arguments()), saved=self.Saved(x))

    def bwd(self, saved: Any, dy: Tensor) -> Grads:
        return Grads(self.dkernel(dy, saved.x, *self._arguments()))

    def _arguments(self) -> tuple[Any, ...]:
        return self.gate_first, self.interleave, *[getattr(self, name) for name in self.options]

    def arguments(self) -> tuple[Any, ...]:
        return type(self).kernel.name, *self._arguments()

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        return _infer(x, self.interleave)

    def extra_repr(self) -> str:
        shown_options = [f"{name}={getattr(self, name)!r}" for name in self.options]
        if not self.gate_first:
            shown_options.append("gate_first=False")
        if self.interleave is not None:
            shown_options.append(f"interleave={self.interleave}")
        return ", ".join(shown_options)


def _infer(x: Spec, interleave: int | None) -> Spec:
    arithmetic(x)
    if interleave is None and x.width % 2:
        raise ValueError(f"x's last dimension must be even, two halves, but is {x.width} {shown(x)}")
    if interleave is not None and x.width % (2 * interleave):
        raise ValueError(
            f"x's last dimension must be a multiple of {2 * interleave}, two blocks of interleave={interleave}, but is "
            f"{x.width} {shown(x)}"
        )
    return x._replace(shape=(*x.shape[:-1], x.width // 2))


class SwiGLU(_Gated):
    """`y = silu(a) b`.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    kernel, dkernel = kernels.swiglu, kernels.dswiglu

    class Saved(Saved):
        x: Tensor = reads_for("x")

    def formula(self, a: Tensor, b: Tensor) -> Tensor:
        return F.silu(a) * b


class GEGLU(_Gated):
    """`y = gelu(a) b`, with GELU's tanh approximation if `approximate="tanh"`.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    kernel, dkernel = kernels.geglu, kernels.dgeglu
    options = ("approximate",)

    class Saved(Saved):
        x: Tensor = reads_for("x")

    def __init__(self, approximate: str = "none", *, gate_first: bool = True, interleave: int | None = None) -> None:
        super().__init__(gate_first=gate_first, interleave=interleave)
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate

    def formula(self, a: Tensor, b: Tensor) -> Tensor:
        return F.gelu(a, approximate=self.approximate) * b


class QGEGLU(_Gated):
    """`y = a sigmoid(1.702 a) b`: the gate is `QGELU`."""

    kernel, dkernel = kernels.qgeglu, kernels.dqgeglu

    class Saved(Saved):
        x: Tensor = reads_for("x")

    def formula(self, a: Tensor, b: Tensor) -> Tensor:
        return a * torch.sigmoid(1.702 * a) * b


class ReGLU(_Gated):
    """`y = max(a, 0) b`.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    kernel, dkernel = kernels.reglu, kernels.dreglu

    class Saved(Saved):
        x: Tensor = reads_for("x")

    def formula(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(a) * b


class SReGLU(_Gated):
    """`y = max(a, 0)² b`: the gate is `SReLU`."""

    kernel, dkernel = kernels.sreglu, kernels.dsreglu

    class Saved(Saved):
        x: Tensor = reads_for("x")

    def formula(self, a: Tensor, b: Tensor) -> Tensor:
        gate = torch.relu(a)
        return gate * gate * b


class ClampedSwiGLU(_Gated):
    """`y = a' sigmoid(alpha a') b'` with `a' = min(a, limit)` and `b' = clamp(b, -limit, limit) + offset`.

    Gradients are zero outside the clamp and pass at equality. Sixteen-bit x is calculated with in float32.

    Source: the feed-forward layers of OpenAI's gpt-oss, 2025.
    """

    kernel, dkernel = kernels.clamped_swiglu, kernels.dclamped_swiglu
    options = ("limit", "alpha", "offset")

    class Saved(Saved):
        x: Tensor = reads_for("x")

    def __init__(
        self,
        limit: float = 7.0,
        alpha: float = 1.702,
        offset: float = 1.0,
        *,
        gate_first: bool = True,
        interleave: int | None = None,
    ) -> None:
        super().__init__(gate_first=gate_first, interleave=interleave)
        if not limit >= 0:
            raise ValueError(f"limit must be at least 0, got {limit}")
        self.limit = limit
        self.alpha = alpha
        self.offset = offset

    def formula(self, a: Tensor, b: Tensor) -> Tensor:
        a = a.clamp(max=self.limit)
        return a * torch.sigmoid(self.alpha * a) * (b.clamp(-self.limit, self.limit) + self.offset)


class SiTUGLU(_Gated):
    """`y = beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2)`: a SwiGLU whose two factors are bounded smoothly.

    Sixteen-bit x is calculated with in float32.
    """

    kernel, dkernel = kernels.situ_glu, kernels.dsitu_glu
    options = ("beta1", "beta2")

    class Saved(Saved):
        x: Tensor = reads_for("x")

    def __init__(
        self, beta1: float = 4.0, beta2: float = 25.0, *, gate_first: bool = True, interleave: int | None = None
    ) -> None:
        super().__init__(gate_first=gate_first, interleave=interleave)
        if not (beta1 > 0 and beta2 > 0):
            raise ValueError(f"beta1 and beta2 must be positive, got {beta1} and {beta2}")
        self.beta1 = beta1
        self.beta2 = beta2

    def formula(self, a: Tensor, b: Tensor) -> Tensor:
        gate = self.beta1 * torch.tanh(a / self.beta1) * torch.sigmoid(a)
        return gate * (self.beta2 * torch.tanh(b / self.beta2))


class GLU(_Passes, torch.nn.GLU):
    """`y = a sigmoid(b)` with a the first half. `torch.nn.GLU`, as an op: here the second half gates.

    With a `dim` other than the last it runs on its own. Raises `ValueError` on an odd last dimension.

    Source: Dauphin et al., "Language Modeling with Gated Convolutional Networks", 2016.
    """

    fixed = ("dim",)

    class Saved(Saved):
        x: Tensor = reads_for("x")

    def reference(self, x: Tensor) -> Tensor:
        return F.glu(x, self.dim)

    def fwd(self, x: Tensor) -> Out:
        return Out(kernels.glu(x), saved=GLU.Saved(x))

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return Grads(kernels.dglu(dy, saved.x))

    def arguments(self) -> tuple[Any, ...]:
        return "glu", False, None

    def declines(self) -> str | None:
        return None if self.dim == -1 else f"GLU splits dim {self.dim}; only the last, dim=-1, can be fused"

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        return _infer(x, None)


#: All of them, for the slots of rules.
Gated: TypeAlias = SwiGLU | GEGLU | QGEGLU | ReGLU | SReGLU | GLU | ClampedSwiGLU | SiTUGLU
