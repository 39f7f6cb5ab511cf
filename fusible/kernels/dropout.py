"""Dropout with a mask that is kept, or with one that is made again from a seed.

What a forward kernel returns for the backward one is called mask: the mask itself, of bools, where the torch body ran,
with the values and the random stream of `torch.nn.functional.dropout`; or the seed, two integers drawn from torch's
generator, where a backend with a generator of its own ran. The torch body keeps masks since making them again with
torch's operators takes five times as long as drawing them. `dropout_mask` says in torch's operators what a seed means.

The scale is `1 / (1 - p)`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fusible.kernels.registry import kernel

_LOW = 0xFFFFFFFF
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85


def philox(block: Tensor, key: int, stream: int) -> Tensor:
    """Philox4x32-10: the four random words of each block, a number of 64 bits: [n] -> [n, 4], in int64.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    a, b = block & _LOW, block >> 32 & _LOW
    c, d = torch.full_like(a, stream & _LOW), torch.full_like(a, stream >> 32 & _LOW)
    keys = [key & _LOW, key >> 32 & _LOW]
    for _ in range(10):
        p, q = a * _FACTORS[0], c * _FACTORS[1]  # the low 64 bits, as of unsigned integers
        a, b = (q >> 32 & _LOW) ^ b ^ keys[0], q & _LOW
        c, d = (p >> 32 & _LOW) ^ d ^ keys[1], p & _LOW
        keys = [(k + step) & _LOW for k, step in zip(keys, _STEPS, strict=True)]
    return torch.stack((a, b, c, d), -1)


def new_seed() -> Tensor:
    """Two integers from torch's generator."""
    return torch.empty(2, dtype=torch.int64).random_()


class _State(threading.local):
    same_masks = False


_state = _State()


@contextmanager
def same_masks() -> Iterator[None]:
    """Lets the formula of dropout draw what the kernel for the same tensor draws, for comparisons; slowly."""
    before, _state.same_masks = _state.same_masks, True
    try:
        yield
    finally:
        _state.same_masks = before


def formula(x: Tensor, p: float) -> Tensor:
    """`torch.nn.functional.dropout`; within `same_masks`, with the masks of a kernel that makes them of seeds."""
    plain = torch.compiler.is_compiling() or not (_state.same_masks and x.dim())
    if plain or not dropout.choose(x.device.type, x.dtype, x.shape[-1]):
        return torch.nn.functional.dropout(x, p)
    scale = 1 / (1 - p)
    return x * dropout_mask(x, new_seed(), scale) * scale


def dropout_mask(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The mask of bools for x, whose element i in row-major order is dropped if word i % 4 of block i // 4 is low."""
    if mask.dtype is torch.bool or not mask.numel():  # for no elements torch's mask has x's dtype
        return mask
    key, stream = mask.tolist()
    words = philox(torch.arange((x.numel() + 3) // 4), key, stream).flatten()[: x.numel()]
    threshold = min(round((1 - 1 / scale) * 2**32), _LOW)
    return (words >= threshold).view(x.shape)


@kernel
def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """`x mask scale` for `0 < p < 1`; the mask's elements are true with probability `1 - p`. Returns (y, mask)."""
    return torch.native_dropout(x, p, True)


@kernel
def dropout_add(x: Tensor, residual: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """`x mask scale + residual`, as `dropout`. Returns (y, mask)."""
    y, mask = torch.native_dropout(x, p, True)
    return y.add_(residual), mask


@kernel
def ddropout(dy: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`dy mask scale`."""
    return (dy * dropout_mask(dy, mask, scale)).mul_(scale)
