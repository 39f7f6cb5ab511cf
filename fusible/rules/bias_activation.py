"""A bias and the activation behind it in one pass: forward the sum and its activation, backward both gradients."""

from __future__ import annotations

from fusible.op import Grads, Out, reads_for
from fusible.ops import Bias
from fusible.ops.activation import Activation
from fusible.ops.gated import Gated
from fusible.rule import backward, forward

__all__ = ["bias_act", "bias_activation"]


@forward(aliases=False)
def bias_act(bias: Bias, act: Activation | Gated, /, x, b, *, env):
    """The sum is written, where backward reads it, and activated in one pass."""
    y, record = act.fwd_bias(x, b if b.dtype is x.dtype else b.to(x.dtype), env.keeps.act)
    return Out(y, act=record)


@backward(aliases=False)
def bias_activation(bias: Bias, act: Activation | Gated, /, bias_saved, act_saved, dy, b=reads_for()):
    """The activation's gradient, summed over the rows as the bias's in one pass."""
    dx, db = act.bwd_bias(act_saved, dy)
    return Grads(dx, bias={"bias": db})


@bias_activation.requires
def _(bias, act, env):
    yield env.needs.bias.bias, "the bias is frozen, so there is no gradient to sum", "let it require grad"
