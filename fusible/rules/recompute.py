"""Backward that computes an activation again instead of keeping it. Costs one more pointwise pass, keeps less."""

from __future__ import annotations

from fusible import kernels
from fusible.op import Grads, reads_for
from fusible.ops import BasicLinear, Bias
from fusible.ops.activation import KeepsInput
from fusible.ops.gated import Gated
from fusible.rule import backward

__all__ = ["activation_linear_recompute"]


@backward(forgets=("linear.x",), aliases=False)
def activation_linear_recompute(
    bias: Bias | None, act: KeepsInput | Gated, linear: BasicLinear, /,
    bias_saved, act_saved, linear_saved, dy, b=reads_for(), weight=reads_for("x", "bias.bias"), *, env,
):  # fmt: skip
    """The linear layer's input is the activation's output, computed again from what the activation keeps.

    A bias before the activation joins, so that no rule for the two of them takes the activation away.
    """
    dw = kernels.dgemm_weight(dy, act.fwd(act_saved.x).values[0])
    dx = act.bwd(act_saved, kernels.dgemm_x(dy, weight)).values[0]
    if bias is None:
        return Grads(dx, linear={"weight": dw})
    return Grads(dx, bias={"bias": kernels.dbias(dx) if env.needs.bias.bias else None}, linear={"weight": dw})


@activation_linear_recompute.requires
def _(bias, act, linear, env):
    yield env.needs.linear.weight, "the weight is frozen, so its input is not kept anyway"
    weight = linear.weight.dtype
    same = env.dtype == env.out_dtype == weight
    yield same, f"x is {env.dtype}, the weight {weight} and the result {env.out_dtype}: the GEMMs need one dtype"
