"""Backward that computes a linear layer's input again instead of keeping it: an activation's output, or a norm's.

Each rule comes twice. In `LEAN` it always applies and costs one more pointwise pass where no kernel does both at once;
in `DEFAULT` its `_onepass` twin applies only where one does, and costs no more than writing the result.
"""

from __future__ import annotations

from fusible import kernels
from fusible.op import NOWHERE, Grads, reads_for
from fusible.ops import BasicLinear, Bias, LayerNorm, MakeExtraOutput, RMSNorm
from fusible.ops.activation import KeepsInput
from fusible.ops.gated import Gated
from fusible.rule import backward
from fusible.rules.linear_backward import one_gemm_dtype

__all__ = [
    "activation_linear_onepass",
    "activation_linear_recompute",
    "norm_linear_onepass",
    "norm_linear_recompute",
]


@backward(forgets=("linear.x",), aliases=False)
def activation_linear_recompute(
    bias: Bias | None, act: KeepsInput | Gated, linear: BasicLinear, /,
    bias_saved, act_saved, linear_saved, dy, b=reads_for(), weight=reads_for("x", "bias.bias"), *,
    env, into=NOWHERE,
):  # fmt: skip
    """The linear layer's input is the activation's output, computed again from what the activation keeps.

    A bias before the activation joins, so that no rule for the two of them takes the activation away.
    """
    d = kernels.dgemm_x(dy, weight)
    if bias is not None and env.needs.bias.bias:
        dx, db, x = act.bwd_bias_again(act_saved, d)
    else:
        (dx, x), db = act.bwd_again(act_saved, d), None
    grads = {"linear": {"weight": kernels.dgemm_weight(dy, x, into.get("linear.weight"))}}
    return Grads(dx, **grads) if bias is None else Grads(dx, bias={"bias": db}, **grads)


@activation_linear_recompute.requires
def _(bias, act, linear, env):
    yield env.needs.linear.weight, "the weight is frozen, so its input is not kept anyway", "let it require grad"
    yield from one_gemm_dtype(linear, env)


@backward(forgets=("linear.x",), aliases=False)
def norm_linear_recompute(
    out: MakeExtraOutput | None, norm: RMSNorm | LayerNorm, linear: BasicLinear, /,
    out_saved, norm_saved, linear_saved, dy, d_extra=None,
    gain=reads_for("x", "linear.weight"), shift=reads_for("linear.weight"),
    weight=reads_for("x", "norm.weight", "norm.bias"), *, env, into=NOWHERE,
):  # fmt: skip
    """The linear layer's input is the norm's output, computed again from what the norm keeps.

    A residual that begins before the norm joins; its gradient is added in the same pass.
    """
    needs, ndim, zero_centered = env.needs.norm, len(norm.normalized_shape), norm.zero_centered_gamma
    centered = type(norm) is LayerNorm
    x, *statistics = norm_saved
    dx, dgain, dshift, normal = kernels.dnorm_recompute(
        kernels.dgemm_x(dy, weight), x, statistics[0] if centered else None, statistics[-1], gain,
        shift if centered else None, d_extra, zero_centered, needs.weight, centered and needs.bias, ndim,
    )  # fmt: skip
    gradients = {"weight": dgain, "bias": dshift} if centered else {"weight": dgain}
    return Grads(dx, norm=gradients, linear={"weight": kernels.dgemm_weight(dy, normal, into.get("linear.weight"))})


@norm_linear_recompute.requires
def _(out, norm, linear, env):
    yield env.needs.linear.weight, "the weight is frozen, so its input is not kept anyway", "let it require grad"
    reason = "x wants no gradient, so the norm's own backward would do no more than its weight's"
    yield env.needs.x, reason, "let x require grad"
    yield from one_gemm_dtype(linear, env)


activation_linear_onepass = activation_linear_recompute.renamed("activation_linear_onepass")
norm_linear_onepass = norm_linear_recompute.renamed("norm_linear_onepass")


@activation_linear_onepass.requires
def _(bias, act, linear, env):
    yield from _native(env, kernels.dact_recompute)


@norm_linear_onepass.requires
def _(out, norm, linear, env):
    yield from _native(env, kernels.dnorm_recompute)


def _native(env, kernel):
    yield kernel.native(env), "no kernel here gives gradient and output in one pass", "rules.LEAN does it in two"
