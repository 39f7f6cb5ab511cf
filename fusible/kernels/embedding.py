"""Rows of a table, and what flows back to it."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.kernels._dtype import to, wide
from fusible.kernels.activation import dbias
from fusible.kernels.registry import kernel


@kernel
def embedding(table: Tensor, indices: Tensor) -> Tensor:
    """`table[indices]`: [n, d], integers [...] -> [..., d]. Raises `IndexError` where torch sees one out of range."""
    return torch.embedding(table, indices)


@kernel
def dembedding(dy: Tensor, indices: Tensor, count: int, padding: int | None = None) -> Tensor:
    """The sum of dy's rows by index, in float32 at least: [..., d] -> [count, d]; 0 for the index `padding`."""
    d = to(dy, wide(dy.dtype))
    return torch.ops.aten.embedding_dense_backward(d, indices, count, -1 if padding is None else padding, False)


@kernel
def add_rows(x: Tensor, table: Tensor) -> Tensor:
    """`x + table`, one row of the table for each place: [..., t, d], [t, d] or [..., t, d] -> [..., t, d]."""
    return x + to(table, x.dtype)


@kernel
def dadd_rows(dy: Tensor, count: int) -> Tensor:
    """The sum of dy over its leading dimensions, in a table of `count` rows: [..., t, d] -> [count, d]."""
    length, width = dy.shape[-2:]
    total = dy.new_zeros(count, width, dtype=wide(dy.dtype))
    total[:length] = (
        to(dy, wide(dy.dtype)) if dy.dim() == 2 else dbias(dy.flatten(-2), wide(dy.dtype)).view(length, width)
    )
    return total
