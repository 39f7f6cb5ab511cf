"""Cross entropy of rows of logits, forward, backward, and both at once.

n: rows, in any number of leading dimensions; v: classes. `z = cap tanh(x / cap)`, or x itself without a cap; p: the
softmax of z; L: `log sum exp z`; w: the classes' weights, ones if there are none; t: a row's target; s: the smoothing.

    loss = (1 - s) w_t (L - z_t) + s/v sum_j w_j (L - z_j) + z_loss w_t L²
    dz_j = p_j ((1 - s) w_t + s/v sum w + 2 z_loss w_t L) - s/v w_j - [j = t] (1 - s) w_t

A row whose target is `ignore_index` has loss 0 and gradient 0. All arithmetic is done in float32 or, for float64, in
float64; losses have that dtype, gradients x's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusible.kernels._dtype import to, wide
from fusible.kernels.registry import kernel, recording

__all__ = ["Targets", "count_targets", "cross_entropy", "cross_entropy_", "dcross_entropy", "dcross_entropy_"]


class Targets(NamedTuple):
    """What a loss is computed against, and how: class indices of int64, and the options of the formula.

    `class_weight` is [v], in the dtype of the arithmetic, and `of_classes` its sum; `None` and v stand for ones.
    """

    target: Tensor
    class_weight: Tensor | None
    of_classes: float
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0

    def flat(self) -> Targets:
        """With the targets one after another."""
        return self._replace(target=self.target.reshape(-1))

    def rows(self, start: int, stop: int) -> Targets:
        """Those of some rows, of flat targets."""
        return self._replace(target=self.target[start:stop])


@kernel
def count_targets(
    target: Tensor, class_weight: Tensor | None, classes: int, ignore_index: int
) -> tuple[int, float, float]:
    """(the place of the first target that is neither a class nor ignored, or -1; the sum of the weights of those that
    are not ignored; the sum of all classes' weights). The targets are flat: [n]."""
    if recording() or target.is_meta:  # there are no data
        return -1, 1.0, float(classes)
    valid = target != ignore_index
    wrong = ((target < 0) | (target >= classes)) & valid
    of_classes = float(classes) if class_weight is None else class_weight.sum(dtype=torch.float64).item()
    if wrong.any():
        return int(wrong.nonzero()[0]), 0.0, of_classes
    if class_weight is None:
        return -1, float(valid.sum()), of_classes
    return -1, class_weight[target[valid]].sum(dtype=torch.float64).item(), of_classes


def _logits(x: Tensor, soft_cap: float) -> Tensor:
    z = to(x, wide(x.dtype))
    return torch.tanh(z / soft_cap).mul_(soft_cap) if soft_cap else z


def _picked(targets: Targets) -> tuple[Tensor, Tensor]:
    """(which rows are ignored, the targets with class 0 in their place), each [..., 1]."""
    index = targets.target.unsqueeze(-1)
    ignored = index == targets.ignore_index
    return ignored, index.masked_fill(ignored, 0)


def _weight_of(index: Tensor, targets: Targets, like: Tensor) -> Tensor:
    if targets.class_weight is None:
        return like.new_ones(index.shape)
    return targets.class_weight[index.flatten()].view(index.shape)


@kernel
def cross_entropy(x: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Losses and statistics of rows of logits: [..., v] -> [...], [..., 2]. The latter are max z, `L - max z`."""
    z = _logits(x, targets.soft_cap)
    ignored, index = _picked(targets)
    most = z.amax(-1, keepdim=True)
    below = z - most
    log_sum = below.exp().sum(-1, keepdim=True).log_()
    weight = _weight_of(index, targets, z)
    loss = weight * (log_sum - below.gather(-1, index)) * (1 - targets.label_smoothing)
    if targets.label_smoothing:
        weighted = below if targets.class_weight is None else below * targets.class_weight
        distance = targets.of_classes * log_sum - weighted.sum(-1, keepdim=True)
        loss += distance * (targets.label_smoothing / x.shape[-1])
    if targets.z_loss:
        loss += targets.z_loss * weight * (most + log_sum).square()
    stats = torch.cat((most, log_sum), -1).masked_fill_(ignored, 0)
    return loss.masked_fill_(ignored, 0).squeeze(-1), stats


@kernel
def dcross_entropy(x: Tensor, targets: Targets, stats: Tensor, scale: Tensor) -> Tensor:
    """The gradient of the losses to x, times `scale`, which is one number or one for each row, [...]."""
    z = _logits(x, targets.soft_cap)
    ignored, index = _picked(targets)
    most, log_sum = stats[..., :1], stats[..., 1:]
    smoothing, z_loss = targets.label_smoothing, targets.z_loss
    weight = _weight_of(index, targets, z)
    hit = weight * (1 - smoothing)
    along = hit + targets.of_classes * (smoothing / x.shape[-1])
    if z_loss:
        along = along + 2 * z_loss * weight * (most + log_sum)
    dz = ((z - most) - log_sum).exp_().mul_(along)
    if smoothing:
        dz -= (smoothing / x.shape[-1]) * (1.0 if targets.class_weight is None else targets.class_weight)
    dz.scatter_add_(-1, index, -hit)
    dz.mul_(scale if scale.dim() == 0 else scale.unsqueeze(-1))
    if targets.soft_cap:
        dz.mul_(1 - (z / targets.soft_cap).square_())
    return to(dz.masked_fill_(ignored, 0), x.dtype)


@kernel
def cross_entropy_(x: Tensor, targets: Targets, scale: Tensor) -> Tensor:
    """The losses; their gradient, as `dcross_entropy` has it, is written over the contiguous x."""
    loss, stats = cross_entropy.body(x, targets)
    x.copy_(dcross_entropy.body(x, targets, stats, scale))
    return loss


@kernel
def dcross_entropy_(x: Tensor, targets: Targets, stats: Tensor, scale: Tensor) -> Tensor:
    """`dcross_entropy`, over the contiguous x."""
    return x.copy_(dcross_entropy.body(x, targets, stats, scale))
