"""Backward: an activation and the bias before it, whose gradient is the sum of the activation's."""

from __future__ import annotations

from fusible import kernels
from fusible.op import Grads, reads_for
from fusible.ops import Bias
from fusible.ops.activation import Activation
from fusible.rule import backward

__all__ = ["bias_activation"]


@backward(aliases=False)
def bias_activation(bias: Bias, act: Activation, /, bias_saved, act_saved, dy, b=reads_for(), *, env):
    """dact, and its sum over the rows as the bias's gradient."""
    dx = act.bwd(act_saved, dy).values[0]
    db = kernels.dbias(dx) if env.needs.bias.bias else None
    return Grads(dx, bias={"bias": db})


@bias_activation.requires
def _(bias, act, env):
    yield env.needs.bias.bias, "the bias is frozen, so there is no gradient to sum"
