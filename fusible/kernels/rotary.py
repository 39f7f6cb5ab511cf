"""Rotary positions: pairs of elements of the first heads of a packed row, rotated by angles from a table.

h: elements of a head; r: how many of them are rotated, an even number; t: length. A row `[..., t, w]` is whole heads
side by side. A table `[..., t, r]` has the cosines of the r/2 pairs, then their sines, in the arithmetic dtype; it
broadcasts over leading dimensions. Pair i is (i, r/2 + i), or `interleaved` (2i, 2i + 1):

    a' = a cos - b sin,  b' = b cos + a sin

With `inverse` the sines change their sign: the gradient, and, for a table of unit length, the way back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.kernels.registry import kernel


def formula(x: Tensor, table: Tensor, heads: int, head: int, interleaved: bool, inverse: bool = False) -> Tensor:
    """[..., t, w] -> [..., t, w], the first `heads` heads of `head` elements rotated; differentiable."""
    cos, sin = table.unsqueeze(-2).chunk(2, -1)  # [..., t, 1, r/2]
    sin = -sin if inverse else sin
    turned = x[..., : heads * head].unflatten(-1, (heads, head))
    part = turned[..., : table.shape[-1]].to(table.dtype)
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    whole = torch.cat((rotated.to(x.dtype), turned[..., table.shape[-1] :]), -1)
    return torch.cat((whole.flatten(-2), x[..., heads * head :]), -1)


@kernel
def rotate(x: Tensor, table: Tensor, heads: int, head: int, interleaved: bool, inverse: bool = False) -> Tensor:
    """`formula`, into fresh memory."""
    return formula(x, table, heads, head, interleaved, inverse)


@kernel
def rotate_(x: Tensor, table: Tensor, heads: int, head: int, interleaved: bool) -> Tensor:
    """`formula`, written over x, an intermediate of ours; x is returned."""
    width = heads * head
    turned = x[..., :width]
    turned.copy_(formula(turned, table, heads, head, interleaved))
    return x


@kernel
def pack(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three tensors [..., t, heads, h], the heads of each their own number, side by side: [..., t, w]."""
    return torch.cat([part.flatten(-2) for part in (q, k, v)], -1)


@kernel
def unrotate_pack(q: Tensor, k: Tensor, v: Tensor, table: Tensor, heads: int, interleaved: bool) -> Tensor:
    """`pack`, and the first `heads` heads rotated back in the same pass: the gradient of a rotation."""
    return formula(pack.body(q, k, v), table, heads, q.shape[-1], interleaved, True)
