"""Ops with an extra input or output: `AddExtraInput`, `MakeExtraOutput`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible import kernels
from fusible.op import Grads, Op, Out, Saved, Spec
from fusible.ops._checks import arithmetic

__all__ = ["AddExtraInput", "MakeExtraOutput"]


class AddExtraInput(Op):
    """`y = x + extra`, where extra is an extra input of exactly x's shape.

    Without a name the caller passes extra by position, in chain order; with one it is the extra output of that name
    made earlier in the block, or the block's shared input of that name. y has the dtype that torch promotes the two to.
    Raises `ValueError` if the shapes differ, and on integer or complex tensors.
    """

    num_extra_inputs = 1
    aliases = False
    grad_aliases = False
    #: What it says of an extra input of another shape.
    mismatch = "its extra input must have x's shape {x} but has {extra}; expand it first"

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name

    def reference(self, x: Tensor, extra: Tensor) -> Tensor:
        return x + extra

    def fwd(self, x: Tensor, extra: Tensor) -> Out:
        return Out(kernels.add(x, extra))

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return Grads(dy, dy)

    def infer(self, x: Spec, extra: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        arithmetic(x)
        arithmetic(extra, "its extra input")
        if extra.shape != x.shape:
            raise ValueError(self.mismatch.format(x=list(x.shape), extra=list(extra.shape)))
        return x._replace(dtype=torch.promote_types(x.dtype, extra.dtype))

    def extra_input_names(self) -> tuple[Any, ...]:
        return (self.name,)

    def extra_repr(self) -> str:
        return "" if self.name is None else repr(self.name)


class MakeExtraOutput(Op):
    """Hands x on, and out of the block as an extra output: `y, extra = x, x`. Any dtype.

    With a name that an op further on reads, the extra output stays inside the block unless `keep=True`.
    """

    num_extra_outputs = 1
    calculates = False
    grad_aliases = False
    hands_on = True

    def __init__(self, name: str | None = None, keep: bool = False) -> None:
        super().__init__()
        self.name = name
        self.keep = keep

    def reference(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def fwd(self, x: Tensor) -> Out:
        return Out(x, x)

    def bwd(self, saved: Saved, dy: Tensor | None, d_extra: Tensor | None) -> Grads:
        if dy is None or d_extra is None:
            return Grads(d_extra if dy is None else dy)
        return Grads(kernels.add(dy, d_extra))

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> tuple[Spec, Spec]:
        return x, x

    def extra_output_names(self) -> tuple[Any, ...]:
        return (self.name,)

    def extra_repr(self) -> str:
        return ", ".join(([] if self.name is None else [repr(self.name)]) + (["keep=True"] if self.keep else []))
