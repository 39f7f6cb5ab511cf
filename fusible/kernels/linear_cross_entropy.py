"""A linear layer and the cross entropy of its result, by chunks of rows: the logits are never there as a whole.

n: rows; d: features; v: classes. x [n, d], weight [v, d] and bias [v] have one dtype; targets are flat, [n]. Each
chunk's logits are made in one buffer, over which their gradient is written, from which the gradients of x, weight and
bias are made at once. These have the dtype of the arithmetic, float32 or float64: unscaled ones in float16 would
underflow, and sums over chunks in bfloat16 lose digits.

A chunk has `MIN_ROWS` rows, or as many as make `CHUNK` logits if that is more: with fewer, adding to the weight's
gradient costs more than the cache brings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fusible._torch import cpu_capabilities
from fusible.kernels._dtype import to, wide
from fusible.kernels.activation import dbias
from fusible.kernels.cross_entropy import Targets, cross_entropy, cross_entropy_, dcross_entropy_
from fusible.kernels.library import load, operators
from fusible.kernels.registry import kernel, recording

__all__ = ["Wanted", "dlinear_cross_entropy", "linear_cross_entropy", "linear_cross_entropy_grads"]

MIN_ROWS = 192
CHUNK = 1 << 22
#: Rows of the weight that are converted at a time.
PANEL = 2048


class Wanted(NamedTuple):
    """Which gradients."""

    x: bool
    weight: bool
    bias: bool


_Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


@kernel
def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets) -> tuple[Tensor, Tensor]:
    """The losses [n] of `x Wᵀ + b`, and the statistics [n, 2] of its rows, as `cross_entropy` has them."""
    losses = _empty(x, (x.shape[0],), wide(x.dtype))
    stats = _empty(x, (x.shape[0], 2), wide(x.dtype))

    def step(logits: Tensor, start: int, stop: int) -> None:
        losses[start:stop], stats[start:stop] = cross_entropy(logits, targets.rows(start, stop))

    for start, stop, logits in _chunks(x, _products(weight, bias)):
        step(logits, start, stop)
    return losses, stats


@kernel
def linear_cross_entropy_grads(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, scale: Tensor, wanted: Wanted
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(losses [n], dx, dweight, dbias): the losses, and the gradients of their sum times the number `scale`."""
    losses = _empty(x, (x.shape[0],), wide(x.dtype))

    def step(logits: Tensor, start: int, stop: int) -> None:
        losses[start:stop] = cross_entropy_(logits, targets.rows(start, stop), scale)

    return losses, *_grads(x, weight, bias, step, wanted)


@kernel
def dlinear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, stats: Tensor, scale: Tensor, wanted: Wanted
) -> _Grads:
    """(dx, dweight, dbias) of the sum of the losses times `scale` [n], from logits made again."""

    def step(logits: Tensor, start: int, stop: int) -> None:
        dcross_entropy_(logits, targets.rows(start, stop), stats[start:stop], scale[start:stop])

    return _grads(x, weight, bias, step, wanted)


def _grads(
    x: Tensor, weight: Tensor, bias: Tensor | None, step: Callable[[Tensor, int, int], None], wanted: Wanted
) -> _Grads:
    """`step(logits, first row, last)` turns a chunk of logits into their gradient."""
    dtype = wide(x.dtype)
    (n, d), v = x.shape, weight.shape[0]
    products = _products(weight, bias)
    dx = _empty(x, (n, d), dtype) if wanted.x else None
    dweight = _empty(x, (v, d), dtype) if wanted.weight else None
    total = x.new_zeros(v, dtype=dtype) if wanted.bias else None
    if dweight is not None and n == 0:
        dweight.zero_()
    for start, stop, logits in _chunks(x, products):
        step(logits, start, stop)
        if dx is not None:
            products.dx(logits, dx[start:stop])
        if dweight is not None:
            products.add_dweight(logits, x[start:stop], dweight, start == 0)
        if total is not None:
            total += to(dbias(logits), dtype)
    return dx, dweight, total


def _chunks(x: Tensor, products: _Whole | _Panels) -> Iterator[tuple[int, int, Tensor]]:
    """(first row, last, logits) of each chunk, all in one buffer."""
    n, v = x.shape[0], products.weight.shape[0]
    if n == 0:
        return
    most = n if recording() else max(MIN_ROWS, CHUNK // max(v, 1))
    count = -(-n // most)
    step = min(16, most)  # products like full vectors
    rows = -(-n // (count * step)) * step  # chunks of about one size
    buffer = _empty(x, (rows, v), products.dtype)
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        logits = buffer[: stop - start]
        products.logits(x[start:stop], logits)
        yield start, stop, logits


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if like.device.type == "cpu" and load() and not recording():
        return operators.empty(shape, dtype)
    return like.new_empty(shape, dtype=dtype)


def _products(weight: Tensor, bias: Tensor | None) -> _Whole | _Panels:
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    if narrow and weight.device.type == "cpu" and not _multiplies(weight.dtype):
        return _Panels(weight, bias)
    return _Whole(weight, bias)


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies in a narrow dtype whose exponents are wide enough for unscaled gradients."""
    found = cpu_capabilities()
    return dtype is torch.bfloat16 and any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


class _Whole:
    """The products in the dtype of the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias, self.dtype = weight, bias, weight.dtype

    def logits(self, x: Tensor, out: Tensor) -> None:
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)

    def dx(self, dlogits: Tensor, out: Tensor) -> None:
        if out.dtype is self.dtype:
            torch.mm(dlogits, self.weight, out=out)
        else:
            out.copy_(torch.mm(dlogits, self.weight))

    def add_dweight(self, dlogits: Tensor, x: Tensor, total: Tensor, first: bool) -> None:
        if total.dtype is self.dtype:
            total.addmm_(dlogits.t(), x, beta=0 if first else 1)
        elif first:
            total.copy_(torch.mm(dlogits.t(), x))
        else:
            total.add_(torch.mm(dlogits.t(), x))


class _Panels:
    """The products of a narrow dtype in float32, by panels of the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.dtype = weight, torch.float32
        self.bias = None if bias is None else bias.float()

    def _panels(self) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, self.weight.shape[0], PANEL):
            panel = slice(start, start + PANEL)
            yield panel, self.weight[panel].float()

    def logits(self, x: Tensor, out: Tensor) -> None:
        x = x.float()
        for panel, weight in self._panels():
            if self.bias is None:
                torch.mm(x, weight.t(), out=out[:, panel])
            else:
                torch.addmm(self.bias[panel], x, weight.t(), out=out[:, panel])

    def dx(self, dlogits: Tensor, out: Tensor) -> None:
        for panel, weight in self._panels():
            out.addmm_(dlogits[:, panel], weight, beta=0 if panel.start == 0 else 1)

    def add_dweight(self, dlogits: Tensor, x: Tensor, total: Tensor, first: bool) -> None:
        x = x.float()
        for start in range(0, self.weight.shape[0], PANEL):
            panel = slice(start, start + PANEL)
            total[panel].addmm_(dlogits[:, panel].t(), x, beta=0 if first else 1)
