"""Rewrite: a gated MLP as one op that keeps its input alone and computes the rest again in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible import kernels
from fusible.op import NOWHERE, Env, Grads, Into, Op, Out, Saved, Spec
from fusible.ops import BasicLinear
from fusible.ops.gated import Gated
from fusible.rule import rewrite

__all__ = ["GatedMLP", "gated_mlp"]


class GatedMLP(Op):
    """`y = act(x Uᵀ) Dᵀ`, the chain of a linear layer, a gated activation and a linear layer, without biases.

    Keeps x: [..., i]. Backward computes `x Uᵀ` and the activation again, for one more GEMM and pointwise pass.
    """

    aliases = False
    grad_aliases = False

    class Saved(Saved):
        x: Tensor

    def __init__(self, up: BasicLinear, act: Any, down: BasicLinear) -> None:
        super().__init__()
        self.borrowed = (up, act, down)  # a tuple, so that they do not become submodules

    def option_sources(self) -> list[tuple[dict[str, Any], str]]:
        return self.borrowed[1].option_sources()

    def sources(self) -> list[tuple[dict[str, Any], str]]:
        up, _, down = self.borrowed
        return up.sources() + down.sources()

    def reference(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        first, act, last = self.borrowed
        return last.reference(act.reference(first.reference(x, up)), down)

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        first, act, last = self.borrowed
        return last.infer(act.infer(first.infer(x, autocast=autocast)), autocast=autocast)

    def fwd(self, x: Tensor, up: Tensor, down: Tensor) -> Out:
        act = self.borrowed[1]
        return Out(kernels.gemm(act.fwd(kernels.gemm(x, up)).values[0], down), saved=GatedMLP.Saved(x))

    def bwd(self, saved: Any, dy: Tensor, up: Tensor, down: Tensor, *, env: Env, into: Into = NOWHERE) -> Grads:
        act = self.borrowed[1]
        hidden = act.fwd(kernels.gemm(saved.x, up))
        d_down = kernels.dgemm_weight(dy, hidden.values[0], into.get("down")) if env.needs.down else None
        record = hidden.records["saved"]
        del hidden
        d_hidden = act.bwd(record, kernels.dgemm_x(dy, down)).values[0]
        del record
        d_up = kernels.dgemm_weight(d_hidden, saved.x, into.get("up")) if env.needs.up else None
        return Grads(kernels.dgemm_x(d_hidden, up) if env.needs.x else None, up=d_up, down=d_down)


@rewrite
def gated_mlp(up: BasicLinear, act: Gated, down: BasicLinear, /):
    """One op that keeps its input alone and computes the rest again in backward."""
    return GatedMLP(up, act, down)


@gated_mlp.requires
def _(up, act, down, env):
    same = env.dtype == env.out_dtype == up.weight.dtype == down.weight.dtype
    yield same, "x and both weights differ in dtype, or autocast does", "give all of them one dtype"
    yield env.grad_enabled, "no backward will run, so there is nothing to keep less of", "call it with gradients wanted"
