"""Cross entropy in one pass over the rows; see csrc/cross_entropy.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.kernels.cross_entropy import (
    Targets,
    count_targets,
    cross_entropy,
    cross_entropy_,
    dcross_entropy,
    dcross_entropy_,
)
from fusible.kernels.library import applies, load, operators


def _options(targets: Targets) -> tuple[float, int, float, float, float]:
    """As the operators take them, behind the class weights."""
    return targets.of_classes, targets.ignore_index, targets.label_smoothing, targets.z_loss, targets.soft_cap


def _integers(device: str, dtype: torch.dtype, width: int) -> bool:
    return device == "cpu" and dtype is torch.int64 and load()


@count_targets.backend("cpu", _integers)
def _(target: Tensor, class_weight: Tensor | None, classes: int, ignore_index: int) -> tuple[int, float, float]:
    return operators.count_targets(target, class_weight, classes, ignore_index)


@cross_entropy.backend("cpu", applies)
def _(x: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    return operators.cross_entropy(x, targets.target, targets.class_weight, *_options(targets), None, None)


@cross_entropy_.backend("cpu", applies)
def _(x: Tensor, targets: Targets, scale: Tensor) -> Tensor:
    return operators.cross_entropy(x, targets.target, targets.class_weight, *_options(targets), scale, x)[0]


@dcross_entropy.backend("cpu", applies)
def _(x: Tensor, targets: Targets, stats: Tensor, scale: Tensor) -> Tensor:
    dx = operators.empty(x.shape, x.dtype)
    _run(x, targets, stats, scale, dx)
    return dx


@dcross_entropy_.backend("cpu", applies)
def _(x: Tensor, targets: Targets, stats: Tensor, scale: Tensor) -> Tensor:
    _run(x, targets, stats, scale, x)
    return x


def _run(x: Tensor, targets: Targets, stats: Tensor, scale: Tensor, dx: Tensor) -> None:
    operators.dcross_entropy(
        x, targets.target, stats.contiguous(), scale.contiguous(), targets.class_weight, *_options(targets), dx
    )
