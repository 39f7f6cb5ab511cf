"""Backward: two linear layers behind a norm compute their input, the norm's output, again instead of keeping it.

In `LEAN` always, in `DEFAULT` where one kernel gives both, as in `recompute`.
"""

from __future__ import annotations

from fusible import kernels
from fusible.op import Grads, reads_for
from fusible.ops import LayerNorm, MakeExtraOutput, PairLinear, RMSNorm
from fusible.rule import backward

__all__ = ["norm_pair_onepass", "norm_pair_recompute"]


@backward(forgets=("pair.x",), aliases=False)
def norm_pair_recompute(
    out: MakeExtraOutput | None, norm: RMSNorm | LayerNorm, pair: PairLinear, /,
    out_saved, norm_saved, pair_saved, dy, d_extra=None,
    gain=reads_for("x", "pair.first", "pair.second"), shift=reads_for("pair.first", "pair.second"),
    first=reads_for("x", "norm.weight", "norm.bias"), second=reads_for("x", "norm.weight", "norm.bias"), *, env,
):  # fmt: skip
    """The pair's input is computed again from what the norm keeps, in the pass of the norm's gradient.

    A residual that begins before the norm joins; its gradient is added in the same pass.
    """
    needs, ndim, zero_centered = env.needs.norm, len(norm.normalized_shape), norm.zero_centered_gamma
    centered = type(norm) is LayerNorm
    x, *statistics = norm_saved
    dx, dgain, dshift, normal = kernels.dnorm_recompute(
        kernels.dgemm_pair_x(dy, first, second), x, statistics[0] if centered else None, statistics[-1], gain,
        shift if centered else None, d_extra, zero_centered, needs.weight, centered and needs.bias, ndim,
    )  # fmt: skip
    da, db = kernels.dgemm_pair_weights(dy, normal, env.needs.pair.first, env.needs.pair.second)
    gradients = {"weight": dgain, "bias": dshift} if centered else {"weight": dgain}
    return Grads(dx, norm=gradients, pair={"first": da, "second": db})


@norm_pair_recompute.requires
def _(out, norm, pair, env):
    needs = env.needs.pair
    yield needs.first or needs.second, "both weights are frozen, so their input is not kept anyway"
    yield env.needs.x, "x wants no gradient, so the norm's own backward would do no more than its weight's"
    same = env.dtype == env.out_dtype == pair.first.dtype == pair.second.dtype
    yield same, f"x is {env.dtype}, the weight {pair.first.dtype} and the result {env.out_dtype}: use one dtype"


norm_pair_onepass = norm_pair_recompute.renamed("norm_pair_onepass")


@norm_pair_onepass.requires
def _(out, norm, pair, env):
    native = kernels.dnorm_recompute.native(env)
    yield native, "no kernel here gives gradient and output in one pass", "rules.LEAN does it in two"
