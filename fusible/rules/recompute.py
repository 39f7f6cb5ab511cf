"""Backward that computes an activation again instead of keeping it. Costs one more pointwise pass, keeps less."""

from __future__ import annotations

from fusible import kernels
from fusible.op import Grads
from fusible.ops import BasicLinear
from fusible.ops.activation import KeepsInput
from fusible.ops.gated import Gated
from fusible.rule import backward

__all__ = ["activation_linear_recompute"]


@backward(forgets=("linear.x",))
def activation_linear_recompute(
    act: KeepsInput | Gated, linear: BasicLinear, /, act_saved, linear_saved, dy, weight, *, env
):
    """The linear layer's input is the activation's output, computed again from what the activation keeps."""
    dw = kernels.dgemm_weight(dy, act.fwd(act_saved.x).values[0])
    da = kernels.dgemm_x(dy, weight)
    return Grads(act.bwd(act_saved, da).values[0], linear={"weight": dw})


@activation_linear_recompute.requires
def _(act, linear, env):
    yield env.needs.linear.weight, "the weight is frozen, so its input is not kept anyway"
    same = env.out_dtype == linear.weight.dtype
    yield same, f"the weight is {linear.weight.dtype} and the result {env.out_dtype}: the GEMMs need one dtype"
