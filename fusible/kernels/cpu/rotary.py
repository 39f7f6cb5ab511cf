"""Rotary positions and the packing of heads; see csrc/rotary.cpp."""

from __future__ import annotations

from torch import Tensor

from fusible.kernels.library import applies, operators
from fusible.kernels.rotary import pack, rotate, rotate_, unrotate_pack


def _rows_of(table: Tensor, x: Tensor, leading: int) -> Tensor:
    """The table with rows that repeat over those of x, whose leading dimensions and length are `leading` ones."""
    wanted = x.shape[:leading]
    if table.dim() > 2 and table.shape[:-1] != wanted:
        table = table.expand(*wanted, table.shape[-1])
    return table.contiguous()


@rotate.backend("cpu", applies)
def _(x: Tensor, table: Tensor, heads: int, head: int, interleaved: bool, inverse: bool = False) -> Tensor:
    return operators.rotate(x, _rows_of(table, x, -1), heads, head, interleaved, inverse)


@rotate_.backend("cpu", applies)
def _(x: Tensor, table: Tensor, heads: int, head: int, interleaved: bool) -> Tensor:
    if not x.is_contiguous():
        return rotate_.body(x, table, heads, head, interleaved)
    operators.rotate_(x, _rows_of(table, x, -1), heads, head, interleaved, False)
    return x


@pack.backend("cpu", applies)
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return operators.pack(q, k, v, None, 0, False, False)


@unrotate_pack.backend("cpu", applies)
def _(q: Tensor, k: Tensor, v: Tensor, table: Tensor, heads: int, interleaved: bool) -> Tensor:
    return operators.pack(q, k, v, _rows_of(table, q, -2), heads, interleaved, True)
