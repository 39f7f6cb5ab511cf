"""`Dropout`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible import kernels
from fusible.kernels.dropout import dropout_mask, formula
from fusible.op import Grads, Op, Out, Saved, Spec, reads_for
from fusible.ops._checks import arithmetic

__all__ = ["Dropout"]


class Dropout(Op, torch.nn.Dropout):
    """`y = x mask / (1 - p)` in training, `y = x` in evaluation. `torch.nn.Dropout`, as an op; `inplace` has no effect.

    An element of the mask is 1 with probability `1 - p`, drawn from torch's generator, so that `torch.manual_seed`
    repeats it. The values are those of `torch.nn.Dropout` for the same seed where torch's kernels run; kernels that
    keep no mask draw two integers instead and make the mask of them, again in backward, with the same bits for any
    number of threads. `p` is read at each call. The record holds the mask or those integers (none where p is 0 or 1),
    and the factor. y has x's dtype. Raises `ValueError` on integer or complex x.

    Source: Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", 2014.
    """

    grad_aliases = False

    class Saved(Saved):
        mask: Tensor | None = reads_for("x")
        scale: float = reads_for("x")

    def reference(self, x: Tensor) -> Tensor:
        return formula(x, self.p) if self.training and 0 < self.p < 1 else F.dropout(x, self.p, self.training)

    def fwd(self, x: Tensor) -> Out:
        p = self.p
        if p == 0 or not self.training:
            return Out(x, saved=Dropout.Saved(None, 1.0))
        if p == 1:
            return Out(x * 0.0, saved=Dropout.Saved(None, 0.0))
        y, mask = kernels.dropout(x, p)
        return Out(y, saved=Dropout.Saved(mask, 1 / (1 - p)))

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        mask, scale = saved
        if mask is not None:
            return Grads(kernels.ddropout(dy, mask, scale))
        return Grads(dy if scale == 1 else dy * scale)

    def replay(self, saved: Saved, x: Tensor) -> Tensor:
        mask, scale = saved
        return x * scale if mask is None else x * dropout_mask(x, mask, scale) * scale

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        return arithmetic(x)

    def is_identity(self) -> bool:
        return not self.training
