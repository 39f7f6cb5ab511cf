"""The end of a residual branch with dropout: dropout and addition in one pass, and the norm behind them, both ways."""

from __future__ import annotations

from fusible import kernels
from fusible.op import Grads, Out, reads_for
from fusible.ops import AddExtraInput, Dropout, LayerNorm, MakeExtraOutput, RMSNorm
from fusible.rule import backward, forward
from fusible.rules.add_norm import add_and_norm, extra_like_stream

__all__ = ["ddropout_add_norm", "dropout_add", "dropout_add_norm"]


@forward(aliases=False)
def dropout_add(dropout: Dropout, add: AddExtraInput, /, x, extra):
    """What is not dropped is added to the residual in one pass."""
    if not 0 < dropout.p < 1:
        branch = dropout.fwd(x)
        return Out(kernels.add(branch.values[0], extra), dropout=branch.records["saved"])
    y, mask = kernels.dropout_add(x, extra, dropout.p)
    return Out(y, dropout=Dropout.Saved(mask, 1 / (1 - dropout.p)))


@dropout_add.requires
def _(dropout, add, env):
    yield from extra_like_stream(env)


@forward(aliases=False)
def dropout_add_norm(
    dropout: Dropout, add: AddExtraInput, out: MakeExtraOutput | None, norm: RMSNorm | LayerNorm, /,
    x, extra, weight, bias,
):  # fmt: skip
    """The sum of what is not dropped and the residual is written and normalised in one pass."""
    p, centered = dropout.p, type(norm) is LayerNorm
    if not 0 < p < 1:
        branch = dropout.fwd(x)
        y, record, total = add_and_norm(norm, branch.values[0], extra, weight, bias)
        return Out(y, *([] if out is None else [total]), dropout=branch.records["saved"], norm=record)
    eps = norm.epsilon(x.dtype) if isinstance(norm, RMSNorm) else norm.eps
    ndim = len(norm.normalized_shape)
    y, mean, rstd, total, mask = kernels.dropout_add_norm(
        x, extra, p, weight, bias, eps, ndim, norm.zero_centered_gamma, centered
    )
    record = LayerNorm.Saved(total, mean, rstd) if centered else RMSNorm.Saved(total, rstd)
    return Out(y, *([] if out is None else [total]), dropout=Dropout.Saved(mask, 1 / (1 - p)), norm=record)


@dropout_add_norm.requires
def _(dropout, add, out, norm, env):
    yield from extra_like_stream(env)


@backward(aliases=False)
def ddropout_add_norm(
    dropout: Dropout, add: AddExtraInput, out: MakeExtraOutput | None, norm: RMSNorm | LayerNorm, /,
    dropout_saved, add_saved, out_saved, norm_saved, dy, d_extra=None,
    weight=reads_for("x", "add.extra"), bias=reads_for(), *, env,
):  # fmt: skip
    """The norm's gradient, and what of it was not dropped, in one pass; the residual's other gradient joins."""
    (x, *statistics), (mask, scale), needs = norm_saved, dropout_saved, env.needs.norm
    centered = type(norm) is LayerNorm
    mean, rstd = statistics[0] if centered else None, statistics[-1]
    zero_centered, ndim = norm.zero_centered_gamma, len(norm.normalized_shape)
    wanted = needs.weight, centered and needs.bias
    if mask is None:  # nothing, or all, was dropped
        dx, dweight, dbias = kernels.dnorm_add(dy, x, mean, rstd, weight, d_extra, zero_centered, *wanted, ndim)
        dropped = dx if scale == 1 else dx * scale
    else:
        dropped, dx, dweight, dbias = kernels.ddropout_add_norm(
            dy, x, mean, rstd, weight, d_extra, mask, scale, zero_centered, *wanted, ndim
        )
    return Grads(dropped, dx, norm={"weight": dweight, "bias": dbias} if centered else {"weight": dweight})


@ddropout_add_norm.requires
def _(dropout, add, out, norm, env):
    yield from extra_like_stream(env)
    yield env.needs.x, "what is dropped wants no gradient", "let x, or a parameter before Dropout, require grad"
