"""Cross entropy of class indices: of logits, and of a linear layer's result without ever making that as a whole.

d: features; v: classes; `...`: the rows, any leading dimensions or none.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible import _torch, kernels
from fusible.kernels import Targets, Wanted
from fusible.op import Env, Grads, Op, Out, Saved, Spec, reads_for
from fusible.ops._checks import arithmetic, shown
from fusible.ops.linear import compute_dtype, plain_linear

__all__ = ["CrossEntropy", "LinearCrossEntropy"]

OPTIONS = ("reduction", "ignore_index", "label_smoothing", "z_loss", "soft_cap")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a loss: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class Loss(Op):
    """What the two ops have in common: the targets as an extra input, the options, and the reduction."""

    num_extra_inputs = 1
    lengthwise = ("target",)
    aliases = False
    grad_aliases = False
    fixed = OPTIONS

    def _set_options(
        self,
        reduction: str,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        soft_cap: float | None,
        class_weight: Tensor | None,
        name: str | None,
    ) -> None:
        kind = type(self).__name__
        if reduction not in ("none", "mean", "sum"):
            raise ValueError(f"{kind}: reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"{kind}: label_smoothing must be from 0 to 1, got {label_smoothing}")
        if soft_cap is not None and not soft_cap > 0:
            raise ValueError(f"{kind}: soft_cap must be positive, got {soft_cap}; None caps nothing")
        if class_weight is not None and class_weight.dim() != 1:
            raise ValueError(f"{kind}: class_weight must have one dimension, got shape {list(class_weight.shape)}")
        self.reduction, self.ignore_index, self.name = reduction, ignore_index, name
        self.label_smoothing, self.z_loss, self.soft_cap = label_smoothing, z_loss, soft_cap
        self.register_buffer("class_weight", class_weight)

    def extra_input_names(self) -> tuple[Any, ...]:
        return (self.name,)

    def _options_shown(self) -> str:
        defaults = ("mean", -100, 0.0, 0.0, None)
        changed = [name for name, value in zip(OPTIONS, defaults, strict=True) if getattr(self, name) != value]
        return "".join(f", {name}={getattr(self, name)!r}" for name in changed)


def _targets(op: Any, target: Tensor, classes: int, dtype: torch.dtype) -> tuple[Targets, float]:
    """The checked targets, and what a mean divides by. Raises `ValueError` on a target that is no class."""
    weight = op.class_weight if op.class_weight is None else op.class_weight.to(dtype)
    bad, of_rows, of_classes = kernels.count_targets(target.reshape(-1), weight, classes, op.ignore_index)
    if bad >= 0:
        place = [int(i) for i in torch.unravel_index(torch.tensor(bad), target.shape)]
        raise ValueError(
            f"{type(op).__name__}: each target must be a class, from 0 to {classes - 1}, or ignore_index="
            f"{op.ignore_index}, but the one at {place} is {int(target.reshape(-1)[bad])}; the vocabulary has "
            f"{classes} classes"
        )
    options = op.ignore_index, op.label_smoothing, op.z_loss, op.soft_cap or 0.0
    return Targets(target, weight, of_classes, *options), of_rows


def _factor(op: Any, of_rows: float) -> float:
    """What each row's loss counts for in the result; of no rows there is no mean."""
    if op.reduction != "mean":
        return 1.0
    return 1 / of_rows if of_rows else math.inf


def _reduced(op: Any, losses: Tensor, of_rows: float, shape: tuple[int, ...]) -> Tensor:
    if op.reduction == "none":
        return losses.view(shape)
    total = losses.sum(dtype=torch.float64)
    if op.reduction == "mean":
        total = total.div_(of_rows)
    return total.to(losses.dtype)


def _infer(op: Any, x: Spec, target: Spec, classes: int, dtype: torch.dtype) -> Spec:
    if target.dtype is not torch.int64:
        raise ValueError(f"the targets must be class indices of torch.int64, got {target.dtype}; convert them first")
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"the targets must have x's shape without its last dimension, {list(x.shape[:-1])}, but have "
            f"{list(target.shape)}; reshape them"
        )
    weight = op.class_weight
    if weight is not None and weight.numel() != classes:
        raise ValueError(f"class_weight has {weight.numel()} elements but there are {classes} classes {shown(x)}")
    return Spec(x.shape[:-1] if op.reduction == "none" else (), wide(dtype), x.device)


def _formula(op: Any, logits: Tensor, target: Tensor) -> Tensor:
    """The loss of logits [..., v], in plain differentiable torch."""
    z = logits.to(wide(logits.dtype)).reshape(-1, logits.shape[-1])
    if op.soft_cap:
        z = op.soft_cap * torch.tanh(z / op.soft_cap)
    index = target.reshape(-1)
    valid = index != op.ignore_index
    weight = None if op.class_weight is None else op.class_weight.to(z.dtype)
    losses = F.cross_entropy(z, index, weight, ignore_index=op.ignore_index, reduction="none",
                             label_smoothing=op.label_smoothing)  # fmt: skip
    of_rows = valid.to(z.dtype) if weight is None else weight[index.where(valid, 0)] * valid
    if op.z_loss:
        losses = losses + torch.where(valid, op.z_loss * of_rows * z.logsumexp(-1).square(), 0)
    if op.reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / of_rows.sum() if op.reduction == "mean" else losses.sum()


class CrossEntropy(Loss):
    """The cross entropy of logits x [..., v] and class indices [...] of int64, an extra input.

    With `z = soft_cap tanh(x / soft_cap)`, or x itself without a soft cap, `L = log sum exp z`, w the class weights
    (ones if there are none), t a row's target and s the label smoothing, the loss of a row is

        (1 - s) w_t (L - z_t) + s/v sum_j w_j (L - z_j) + z_loss w_t L²

    and 0, without a gradient, where the target is `ignore_index`. y is each row's loss for `reduction="none"`, [...],
    their sum for `"sum"`, and for `"mean"` the sum divided by that of `w_t` over the rows that are not ignored: nan if
    all are. So it is what `torch.nn.functional.cross_entropy` gives, but for x's classes in the last dimension and for
    y's dtype, which is at least float32. In backward one fresh buffer of x's size is made, the gradient's.

    The z-loss is that of PaLM (Chowdhery et al., 2022), the soft cap that of Gemma 2 (2024).

    Args:
        class_weight: [v], kept as a buffer.
        name: as of `AddExtraInput`: the targets come from the block's shared input of that name.

    Raises `ValueError` on targets that have another dtype or shape or are no class, and on integer or complex x.
    """

    class Saved(Saved):
        x: Tensor
        target: Tensor
        stats: Tensor
        class_weight: Tensor | None
        of_classes: float
        factor: float

    def __init__(
        self,
        reduction: str = "mean",
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        soft_cap: float | None = None,
        class_weight: Tensor | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._set_options(reduction, ignore_index, label_smoothing, z_loss, soft_cap, class_weight, name)

    def reference(self, x: Tensor, target: Tensor) -> Tensor:
        return _formula(self, x, target)

    def fwd(self, x: Tensor, target: Tensor) -> Out:
        targets, of_rows = _targets(self, target, x.shape[-1], wide(x.dtype))
        losses, stats = kernels.cross_entropy(x, targets)
        saved = CrossEntropy.Saved(x, target, stats, targets.class_weight, targets.of_classes, _factor(self, of_rows))
        return Out(_reduced(self, losses, of_rows, target.shape), saved=saved)

    def bwd(self, saved: Any, dy: Tensor) -> Grads:
        options = self.ignore_index, self.label_smoothing, self.z_loss, self.soft_cap or 0.0
        targets = Targets(saved.target, saved.class_weight, saved.of_classes, *options)
        scale = dy if saved.factor == 1 else dy * saved.factor
        return Grads(kernels.dcross_entropy(saved.x, targets, saved.stats, scale), None)

    def infer(self, x: Spec, target: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        arithmetic(x)
        return _infer(self, x, target, x.width, x.dtype)

    def extra_repr(self) -> str:
        return self._options_shown().removeprefix(", ")


def linear_infer(op: Any, x: Spec, target: Spec, weight: Tensor, autocast: torch.dtype | None) -> Spec:
    """`infer` of an op with a linear layer, whose options are `op`'s."""
    arithmetic(x)
    classes, features = weight.shape
    if x.width != features:
        raise ValueError(f"weight takes {features} features but x's last dimension is {x.width} {shown(x)}")
    return _infer(op, x, target, classes, compute_dtype(x.dtype, weight.dtype, autocast))


def linear_fwd(op: Any, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None, env: Env) -> Out:
    """`fwd` of an op with a linear layer: gradients at once where they can be scaled later."""
    dtype = compute_dtype(x.dtype, weight.dtype, env.autocast)
    targets, of_rows = _targets(op, target, weight.shape[0], wide(dtype))
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    layer = weight.to(dtype), None if bias is None else bias.to(dtype)
    wanted, factor = _wanted(env), _factor(op, of_rows)
    saved = dict.fromkeys(LinearCrossEntropy.Saved.fields)
    saved |= {"of_classes": targets.of_classes, "factor": factor}
    if not any(wanted):
        losses, _ = kernels.linear_cross_entropy(rows, *layer, targets.flat())
    elif op.reduction == "none" and (wanted.weight or wanted.bias):
        losses, stats = kernels.linear_cross_entropy(rows, *layer, targets.flat())
        x = x if x.dtype is dtype else rows.view(x.shape)
        saved |= {"x": x, "target": target, "stats": stats, "class_weight": targets.class_weight}
    else:
        scale = torch.full((), factor, dtype=wide(dtype), device=x.device)
        losses, *grads = kernels.linear_cross_entropy_grads(rows, *layer, targets.flat(), scale, wanted)
        saved |= dict(zip(("dx", "dweight", "dbias"), grads, strict=True))
        saved["dx"] = None if grads[0] is None else grads[0].view(x.shape)
    return Out(_reduced(op, losses, of_rows, target.shape), saved=LinearCrossEntropy.Saved(**saved))


def linear_bwd(
    op: Any, saved: Any, dy: Tensor, weight: Tensor, bias: Tensor | None, env: Env
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x [..., d], weight and bias."""
    if saved.x is None:
        of_rows = dy.unsqueeze(-1) if dy.dim() else dy
        return _scaled(saved.dx, of_rows), _scaled(saved.dweight, dy), _scaled(saved.dbias, dy)
    options = op.ignore_index, op.label_smoothing, op.z_loss, op.soft_cap or 0.0
    targets = Targets(saved.target, saved.class_weight, saved.of_classes, *options).flat()
    x, dtype = saved.x, saved.x.dtype
    layer = weight.to(dtype), None if bias is None else bias.to(dtype)
    stats, scale = saved.stats, dy.reshape(-1)
    dx, dweight, dbias = kernels.dlinear_cross_entropy(
        x.reshape(-1, x.shape[-1]), *layer, targets, stats, scale, _wanted(env)
    )
    return None if dx is None else dx.view(x.shape), dweight, dbias


def _wanted(env: Env) -> Wanted:
    names = set(env.needs)
    return Wanted("x" in names, "weight" in names, "bias" in names)


def _scaled(gradient: Tensor | None, dy: Tensor) -> Tensor | None:
    """`gradient dy`: over the gradient, which is in memory of our own, if no other backward will read it."""
    if gradient is None or _torch.keep_graph():
        return gradient if gradient is None else gradient * dy
    if dy.device.type == "cpu" and dy.dim() == 0 and dy.item() == 1:
        return gradient
    return gradient.mul_(dy)


class LinearCrossEntropy(Loss):
    """`CrossEntropy` of `x Wᵀ + b`, whose logits [..., v] are never there as a whole: x [..., d], targets [...].

    The logits are made by chunks of rows. For `"mean"` and `"sum"` the wanted gradients of x, weight and bias are made
    of each chunk in forward and scaled in backward, which then multiplies no matrices; so they are kept in between, in
    float32 at least. For `"none"`, where each row's incoming gradient is known in backward only, the chunks are made
    again there, unless nothing but the gradient of x is wanted. Without wanted gradients nothing is kept.

    The weight [v, d] is initialised as that of `torch.nn.Linear`. To tie it, `loss.weight = embedding.weight`. The
    product is in autocast's dtype if autocast is on, else in the weight's. Options, result and errors are those of
    `CrossEntropy`; also raises `ValueError` if x's last dimension is not `in_features`.
    """

    class Saved(Saved):
        dx: Tensor | None = reads_for("x")
        dweight: Tensor | None = reads_for("weight")
        dbias: Tensor | None = reads_for("bias")
        x: Tensor | None
        target: Tensor | None
        stats: Tensor | None
        class_weight: Tensor | None
        of_classes: float
        factor: float

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        reduction: str = "mean",
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        soft_cap: float | None = None,
        class_weight: Tensor | None = None,
        name: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._set_options(reduction, ignore_index, label_smoothing, z_loss, soft_cap, class_weight, name)
        self.in_features, self.num_classes = in_features, num_classes
        self.weight = torch.nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.bias: torch.nn.Parameter | None
        made = torch.nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def reference(self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _formula(self, plain_linear(x, weight, bias), target)

    def fwd(self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None, *, env: Env) -> Out:
        return linear_fwd(self, x, target, weight, bias, env)

    def bwd(self, saved: Any, dy: Tensor, weight: Tensor, bias: Tensor | None, *, env: Env) -> Grads:
        dx, dweight, dbias = linear_bwd(self, saved, dy, weight, bias, env)
        return Grads(dx, None, weight=dweight, bias=dbias)

    def infer(self, x: Spec, target: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        return linear_infer(self, x, target, self.weight, autocast)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.bias is not None}"
        return sizes + self._options_shown()
