"""Sums of two branches."""

from __future__ import annotations

from torch import Tensor

from fusible.kernels.registry import kernel


@kernel
def add(x: Tensor, other: Tensor) -> Tensor:
    """`x + other`, the other broadcast to x's shape, in fresh memory; in the dtype that torch promotes the two to."""
    return x + other
