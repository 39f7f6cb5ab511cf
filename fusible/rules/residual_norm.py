"""Backward: a norm at the start of a residual branch adds the residual's gradient in place on its own fresh one.

Without conditions: `MakeExtraOutput` needs a backward only if x wants its gradient, and both gradients have x's dtype.
"""

from __future__ import annotations

from fusible import kernels
from fusible.op import Grads, reads_for
from fusible.ops import LayerNorm, MakeExtraOutput, RMSNorm
from fusible.rule import backward

__all__ = ["dresidual_layer_norm", "dresidual_rms_norm"]


@backward(aliases=False)
def dresidual_rms_norm(
    out: MakeExtraOutput, norm: RMSNorm, /, out_saved, norm_saved, dy, d_extra, weight=reads_for("x"), *, env
):
    """`dx = drms_norm(dy) + d_extra`."""
    ndim = len(norm.normalized_shape)
    want_weight = env.needs.norm.weight
    dx, dw = kernels.drms_norm_add(dy, *norm_saved, weight, d_extra, norm.zero_centered_gamma, want_weight, ndim)
    return Grads(dx, norm={"weight": dw})


@backward(aliases=False)
def dresidual_layer_norm(
    out: MakeExtraOutput, norm: LayerNorm, /, out_saved, norm_saved, dy, d_extra,
    weight=reads_for("x"), bias=reads_for(), *, env,
):  # fmt: skip
    """`dx = dlayer_norm(dy) + d_extra`."""
    needs, ndim = env.needs.norm, len(norm.normalized_shape)
    dx, dw, db = kernels.dlayer_norm_add(
        dy, *norm_saved, weight, d_extra, norm.zero_centered_gamma, needs.weight, needs.bias, ndim
    )
    return Grads(dx, norm={"weight": dw, "bias": db})
