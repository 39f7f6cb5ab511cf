"""`PairLinear`: two linear layers over one input, side by side.

i: features in; h: features out of each of the two.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusible import kernels
from fusible.op import Env, Grads, Op, Out, Saved, Spec, reads_for
from fusible.ops._checks import arithmetic, shown
from fusible.ops.linear import compute_dtype, plain_linear

__all__ = ["PairLinear"]


class PairLinear(Op):
    """`y = [x Aᵀ, x Bᵀ]`, side by side: [..., i] -> [..., 2h]; the weights A and B are `first` and `second`, [h, i].

    What a gated activation reads, from separate gate and up projections: one pass over x, no packed weight. Both are
    initialised as that of `torch.nn.Linear`. y has autocast's dtype if autocast is on, else the first weight's; the
    record holds x in that dtype. Raises `ValueError` if x's last dimension is not i, and on integer or complex x.
    """

    repeats = True
    aliases = False
    grad_aliases = False

    class Saved(Saved):
        x: Tensor = reads_for("first", "second")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.second = torch.nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.first, self.second):
            torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))

    def reference(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([plain_linear(x, first, None), plain_linear(x, second.to(first.dtype), None)], -1)

    def fwd(self, x: Tensor, first: Tensor, second: Tensor, *, env: Env) -> Out:
        dtype = env.out_dtype
        x, first, second = (t if t.dtype is dtype else t.to(dtype) for t in (x, first, second))
        return Out(kernels.gemm_pair(x, first, second), saved=PairLinear.Saved(x))

    def bwd(
        self,
        saved: Saved,
        dy: Tensor,
        first: Tensor = reads_for("x"),
        second: Tensor = reads_for("x"),
        *,
        env: Env,
    ) -> Grads:
        needs = env.needs
        da = db = None
        if needs.first or needs.second:
            da, db = kernels.dgemm_pair_weights(dy, saved.x, needs.first, needs.second)
        if not needs.x:
            return Grads(None, first=da, second=db)
        first, second = (t if t.dtype is dy.dtype else t.to(dy.dtype) for t in (first, second))
        return Grads(kernels.dgemm_pair_x(dy, first, second), first=da, second=db)

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        arithmetic(x)
        h, i = self.first.shape
        if x.width != i:
            raise ValueError(f"first takes {i} features but x's last dimension is {x.width} {shown(x)}")
        if self.second.shape != self.first.shape:
            raise ValueError(f"second must have the shape of first, {[h, i]}, but has {list(self.second.shape)}")
        return Spec((*x.shape[:-1], 2 * h), compute_dtype(x.dtype, self.first.dtype, autocast), x.device)

    def extra_repr(self) -> str:
        return f"in_features={self.first.shape[1]}, out_features={self.first.shape[0]}"
