"""Rewrite: a linear layer and a cross entropy as one op, which never has the logits as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.op import Env, Grads, Op, Out, Spec
from fusible.ops import BasicLinear, Bias, CrossEntropy, LinearCrossEntropy
from fusible.ops.loss import linear_bwd, linear_fwd, linear_infer
from fusible.rule import rewrite

__all__ = ["JoinedCrossEntropy", "JoinedCrossEntropyBias", "linear_cross_entropy"]


class Joined(Op):
    """What the two ops have in common: whose parameters and options they borrow."""

    num_extra_inputs = 1
    lengthwise = ("target",)
    aliases = False
    grad_aliases = False
    Saved = LinearCrossEntropy.Saved

    def __init__(self, linear: BasicLinear, bias: Bias | None, loss: CrossEntropy) -> None:
        super().__init__()
        self.borrowed = (linear, bias, loss)  # a tuple, so that they do not become submodules

    def sources(self) -> list[tuple[dict[str, Any], str]]:
        linear, bias, _ = self.borrowed
        return linear.sources() + (bias.sources() if bias else [])

    def option_sources(self) -> list[tuple[dict[str, Any], str]]:
        return self.borrowed[2].option_sources()

    def extra_input_names(self) -> tuple[Any, ...]:
        return self.borrowed[2].extra_input_names()

    def infer(self, x: Spec, target: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        linear, _, loss = self.borrowed
        return linear_infer(loss, x, target, linear.weight, autocast)


class JoinedCrossEntropy(Joined):
    """`CrossEntropy` of `x Wᵀ`, as `LinearCrossEntropy` computes it."""

    def reference(self, x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        linear, _, loss = self.borrowed
        return loss.reference(linear.reference(x, weight), target)

    def fwd(self, x: Tensor, target: Tensor, weight: Tensor, *, env: Env) -> Out:
        return linear_fwd(self.borrowed[2], x, target, weight, None, env)

    def bwd(self, saved: Any, dy: Tensor, weight: Tensor, *, env: Env) -> Grads:
        dx, dweight, _ = linear_bwd(self.borrowed[2], saved, dy, weight, None, env)
        return Grads(dx, None, weight=dweight)


class JoinedCrossEntropyBias(Joined):
    """`CrossEntropy` of `x Wᵀ + b`, as `LinearCrossEntropy` computes it."""

    def reference(self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        linear, adding, loss = self.borrowed
        assert adding is not None
        return loss.reference(adding.reference(linear.reference(x, weight), bias), target)

    def fwd(self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor, *, env: Env) -> Out:
        return linear_fwd(self.borrowed[2], x, target, weight, bias, env)

    def bwd(self, saved: Any, dy: Tensor, weight: Tensor, bias: Tensor, *, env: Env) -> Grads:
        dx, dweight, dbias = linear_bwd(self.borrowed[2], saved, dy, weight, bias, env)
        return Grads(dx, None, weight=dweight, bias=dbias)


@rewrite
def linear_cross_entropy(linear: BasicLinear, bias: Bias | None, loss: CrossEntropy, /):
    """One op that makes the logits by chunks of rows, and their gradients with them."""
    return (JoinedCrossEntropyBias if bias else JoinedCrossEntropy)(linear, bias, loss)


@linear_cross_entropy.requires
def _(linear, bias, loss, env):
    ahead = loss.reduction != "none" or not env.needs
    yield ahead, 'with reduction="none" the logits would be made twice', 'reduce the loss, by "mean" or "sum"'
