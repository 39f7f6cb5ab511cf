"""`ConstantScale`."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.op import Grads, Op, Out, Saved, Spec, reads_for
from fusible.ops._checks import arithmetic

__all__ = ["ConstantScale"]


class ConstantScale(Op):
    """`y = scale x`; the scale is a number, read at each call and recorded. y has x's dtype.

    Raises `ValueError` on integer or complex x.
    """

    aliases = False
    grad_aliases = False
    repeats = True

    class Saved(Saved):
        scale: float = reads_for("x")

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def reference(self, x: Tensor) -> Tensor:
        return x * self.scale

    def fwd(self, x: Tensor) -> Out:
        return Out(x * self.scale, saved=ConstantScale.Saved(self.scale))

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return Grads(dy * saved.scale)

    def replay(self, saved: Saved, x: Tensor) -> Tensor:
        return x * saved.scale

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        return arithmetic(x)

    def extra_repr(self) -> str:
        return f"scale={self.scale}"
