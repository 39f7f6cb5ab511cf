"""Ops that calculate nothing: `Identity`, `Reshape`. Any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from fusible.op import Grads, Op, Out, Saved, Spec, reads_for
from fusible.ops._checks import shown

__all__ = ["Identity", "Reshape"]


class Identity(Op, torch.nn.Identity):
    """`y = x`. `torch.nn.Identity`, as an op; it takes any arguments and ignores them."""

    grad_aliases = False

    def reference(self, x: Tensor) -> Tensor:
        return x

    def fwd(self, x: Tensor) -> Out:
        return Out(x)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return Grads(dy)

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        return x

    def is_identity(self) -> bool:
        return True


class Reshape(Op):
    """`y = x.reshape(shape)`, where one dimension of `shape` may be -1. y may be a view of x.

    Raises `ValueError` if the shape cannot hold x's elements.
    """

    calculates = False

    class Saved(Saved):
        shape: tuple[int, ...] = reads_for("x")

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        if not self.shape or self.shape.count(-1) > 1 or min(self.shape) < -1:
            raise ValueError(f"shape must be sizes of at least one dimension, one of them perhaps -1, got {self.shape}")

    def reference(self, x: Tensor) -> Tensor:
        return x.reshape(self.shape)

    def fwd(self, x: Tensor) -> Out:
        return Out(x.reshape(self.shape), saved=Reshape.Saved(tuple(x.shape)))

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return Grads(dy.reshape(saved.shape))

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        elements = prod(x.shape)
        known = prod(size for size in self.shape if size != -1)
        if -1 not in self.shape and known != elements:
            raise ValueError(f"shape {list(self.shape)} holds {known} elements but x has {elements} {shown(x)}")
        if -1 in self.shape and (known == 0 or elements % known):
            raise ValueError(
                f"shape {list(self.shape)} holds multiples of {known} elements but x has {elements} {shown(x)}"
            )
        return x._replace(shape=tuple(elements // known if size == -1 else size for size in self.shape))

    def extra_repr(self) -> str:
        return f"shape={self.shape}"
