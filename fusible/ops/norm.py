"""Normalisations: `LayerNorm`, `RMSNorm`, `QKNorm`, `L2Normalization`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible import kernels
from fusible.op import Env, Grads, Op, Out, Saved, Spec, reads_for
from fusible.ops._checks import arithmetic, shown, trailing

__all__ = ["L2Normalization", "LayerNorm", "QKNorm", "RMSNorm"]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _gain(weight: Tensor | None, dtype: torch.dtype, zero_centered: bool) -> Tensor | None:
    if weight is None:
        return None
    return weight.to(dtype) + 1 if zero_centered else weight.to(dtype)


def _infer(x: Spec, shape: tuple[int, ...], affine: bool) -> Spec:
    return trailing(x, shape, "weight" if affine else "normalized_shape")


class LayerNorm(Op, torch.nn.LayerNorm):
    """`y = (x - mean) / sqrt(var + eps) g + b` over trailing dimensions. `torch.nn.LayerNorm`, as an op.

    g is the weight or, with `zero_centered_gamma`, `1 + weight`, and the weight starts at 0. Statistics and reductions
    are in float32 (float64 for float64 x); y has x's dtype, whatever the parameters' is. Raises `ValueError` if x's
    last dimensions are not `normalized_shape`, and on integer or complex x.

    Source: Ba, Kiros, Hinton, "Layer Normalization", 2016.
    """

    aliases = False
    grad_aliases = False
    fixed = ("eps", "zero_centered_gamma")
    zero_centered_gamma = False

    class Saved(Saved):
        x: Tensor = reads_for("x", "weight")
        mean: Tensor = reads_for("x", "weight")
        rstd: Tensor = reads_for("x", "weight")

    def __init__(
        self, *args: Any, zero_centered_gamma: bool = False, accumulate_into_main_grad: bool = False, **kwargs: Any
    ) -> None:
        self.zero_centered_gamma = zero_centered_gamma
        self.accumulate_into_main_grad = accumulate_into_main_grad
        super().__init__(*args, **kwargs)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.zero_centered_gamma and self.elementwise_affine:
            torch.nn.init.zeros_(self.weight)

    def reference(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        dtype = _wide(x.dtype)
        gain = _gain(weight, dtype, self.zero_centered_gamma)
        bias = None if bias is None else bias.to(dtype)
        return F.layer_norm(x.to(dtype), self.normalized_shape, gain, bias, self.eps).to(x.dtype)

    def fwd(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Out:
        ndim = len(self.normalized_shape)
        y, mean, rstd = kernels.layer_norm(x, weight, bias, self.eps, ndim, self.zero_centered_gamma)
        return Out(y, saved=LayerNorm.Saved(x, mean, rstd))

    def bwd(
        self,
        saved: Saved,
        dy: Tensor,
        weight: Tensor | None = reads_for("x"),
        bias: None = reads_for(),
        *,
        env: Env,
    ) -> Grads:
        needs = env.needs
        if not (needs.x or needs.weight):
            db = kernels.dbias(dy.flatten(-len(self.normalized_shape))).view(self.normalized_shape)
            return Grads(None, weight=None, bias=db)
        dx, dw, db = kernels.dlayer_norm(
            dy,
            *saved,
            weight,
            self.zero_centered_gamma,
            needs.x,
            needs.weight,
            needs.bias,
            len(self.normalized_shape),
        )
        return Grads(dx, weight=dw, bias=db)

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        return _infer(x, self.normalized_shape, self.elementwise_affine)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", zero_centered_gamma=True" if self.zero_centered_gamma else "")


class RMSNorm(Op, torch.nn.RMSNorm):
    """`y = x / sqrt(mean x² + eps) g` over trailing dimensions. `torch.nn.RMSNorm`, as an op.

    g is the weight or, with `zero_centered_gamma`, `1 + weight`, and the weight starts at 0. `eps=None` is the machine
    epsilon of the statistics' dtype: float32, or float64 for float64 x. y has x's dtype, whatever the weight's is.
    Raises `ValueError` if x's last dimensions are not `normalized_shape`, and on integer or complex x.

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    aliases = False
    grad_aliases = False
    fixed = ("eps", "zero_centered_gamma")
    zero_centered_gamma = False

    class Saved(Saved):
        x: Tensor = reads_for("x", "weight")
        rstd: Tensor = reads_for("x", "weight")

    def __init__(
        self, *args: Any, zero_centered_gamma: bool = False, accumulate_into_main_grad: bool = False, **kwargs: Any
    ) -> None:
        self.zero_centered_gamma = zero_centered_gamma
        self.accumulate_into_main_grad = accumulate_into_main_grad
        super().__init__(*args, **kwargs)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.zero_centered_gamma and self.elementwise_affine:
            torch.nn.init.zeros_(self.weight)

    def reference(self, x: Tensor, weight: Tensor | None) -> Tensor:
        dtype = _wide(x.dtype)
        gain = _gain(weight, dtype, self.zero_centered_gamma)
        return F.rms_norm(x.to(dtype), self.normalized_shape, gain, self.eps).to(x.dtype)

    def fwd(self, x: Tensor, weight: Tensor | None) -> Out:
        y, rstd = kernels.rms_norm(
            x, weight, self.epsilon(x.dtype), len(self.normalized_shape), self.zero_centered_gamma
        )
        return Out(y, saved=RMSNorm.Saved(x, rstd))

    def epsilon(self, dtype: torch.dtype) -> float:
        """`eps`, or what stands for `None` with an x of this dtype."""
        return torch.finfo(_wide(dtype)).eps if self.eps is None else self.eps

    def bwd(self, saved: Saved, dy: Tensor, weight: Tensor | None = reads_for("x"), *, env: Env) -> Grads:
        needs = env.needs
        dx, dw = kernels.drms_norm(
            dy, *saved, weight, self.zero_centered_gamma, needs.x, needs.weight, len(self.normalized_shape)
        )
        return Grads(dx, weight=dw)

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        return _infer(x, self.normalized_shape, self.elementwise_affine)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", zero_centered_gamma=True" if self.zero_centered_gamma else "")


class QKNorm(Op):
    """`RMSNorm` over each query and key head of a packed stream, `[..., (h + 2g) e]`; values stay as they are.

    x has `heads` query heads of `head_dim` elements, then `kv_heads` key heads, then as many value heads, as for
    `Attention`. All query heads share `q_weight` [e], all key heads `k_weight` [e]; both start at 1. It goes before
    `Rotary`. Statistics are in float32 (float64 for float64 x); y has x's dtype. Raises `ValueError` on another width,
    and on integer or complex x.

    Source: Henry et al., "Query-Key Normalization for Transformers", 2020, with the RMS in the place of the length.
    """

    aliases = False
    grad_aliases = False
    fixed = ("eps", "head_dim", "heads", "kv_heads")

    class Saved(Saved):
        x: Tensor = reads_for("x", "q_weight", "k_weight")
        q_rstd: Tensor = reads_for("x", "q_weight")
        k_rstd: Tensor = reads_for("x", "k_weight")

    def __init__(
        self, head_dim: int, heads: int, kv_heads: int | None = None, *, eps: float = 1e-6,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.head_dim, self.heads, self.kv_heads, self.eps = (
            head_dim,
            heads,
            heads if kv_heads is None else kv_heads,
            eps,
        )
        self.q_weight = torch.nn.Parameter(torch.empty(head_dim, device=device, dtype=dtype))
        self.k_weight = torch.nn.Parameter(torch.empty(head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.q_weight)
        torch.nn.init.ones_(self.k_weight)

    def _parts(self, x: Tensor) -> Any:
        """Query, key and value heads: [..., h, e], [..., g, e] twice."""
        heads = x.unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_dim))
        return heads.split((self.heads, self.kv_heads, self.kv_heads), -2)

    def reference(self, x: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        q, k, v = self._parts(x)
        dtype = _wide(x.dtype)
        normal = [F.rms_norm(part.to(dtype), (self.head_dim,), weight.to(dtype), self.eps).to(x.dtype)
                  for part, weight in ((q, q_weight), (k, k_weight))]  # fmt: skip
        return torch.cat((*normal, v), -2).flatten(-2)

    def fwd(self, x: Tensor, q_weight: Tensor, k_weight: Tensor) -> Out:
        q, k, v = self._parts(x)
        q, q_rstd = kernels.rms_norm(q, q_weight, self.eps)
        k, k_rstd = kernels.rms_norm(k, k_weight, self.eps)
        return Out(kernels.pack(q, k, v), saved=QKNorm.Saved(x, q_rstd, k_rstd))

    def bwd(
        self,
        saved: Saved,
        dy: Tensor,
        q_weight: Tensor = reads_for("x"),
        k_weight: Tensor = reads_for("x"),
        *,
        env: Env,
    ) -> Grads:
        needs = env.needs
        x, q_rstd, k_rstd = saved
        (q, k, _), (dq, dk, dv) = self._parts(x), self._parts(dy)
        dq_weight = dk_weight = None
        if needs.x or needs.q_weight:
            dq, dq_weight = kernels.drms_norm(dq, q, q_rstd, q_weight, False, needs.x, needs.q_weight)
        if needs.x or needs.k_weight:
            dk, dk_weight = kernels.drms_norm(dk, k, k_rstd, k_weight, False, needs.x, needs.k_weight)
        return Grads(kernels.pack(dq, dk, dv) if needs.x else None, q_weight=dq_weight, k_weight=dk_weight)

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        arithmetic(x)
        total = self.heads + 2 * self.kv_heads
        if x.width != total * self.head_dim:
            raise ValueError(
                f"x's last dimension must be {total} heads of {self.head_dim}, but is {x.width} {shown(x)}"
            )
        return x

    def extra_repr(self) -> str:
        return f"{self.head_dim}, {self.heads}, {self.kv_heads}, eps={self.eps}"


class L2Normalization(Op):
    """`y = x / sqrt(sum x² + eps)` over the last dimension.

    The sum is in float32 (float64 for float64 x); y has x's dtype. Raises `ValueError` on integer or complex x.
    """

    aliases = False
    grad_aliases = False
    fixed = ("eps",)

    class Saved(Saved):
        x: Tensor = reads_for("x")
        inverse: Tensor = reads_for("x")

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def reference(self, x: Tensor) -> Tensor:
        wide = x.to(_wide(x.dtype))
        return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def fwd(self, x: Tensor) -> Out:
        y, inverse = kernels.l2_norm(x, self.eps)
        return Out(y, saved=L2Normalization.Saved(x, inverse))

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return Grads(kernels.dl2_norm(dy, saved.x, saved.inverse))

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        return arithmetic(x)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
