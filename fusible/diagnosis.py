"""What is likely wrong with a result that differs: the patterns that faults of kernels leave."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["likely_cause"]

#: How near a pattern must come to what was found, as a fraction of the error.
NEAR = 0.02


def likely_cause(what: str, got: Tensor, exact: Tensor, limit: float) -> str:
    """Why `got` may differ from `exact` by more than `limit`, in a few words; empty where no pattern fits.

    Args:
        what: the name of the comparison, `circumstance: value`.
    """
    got, exact = got.double(), exact.double()
    if got.shape != exact.shape or not (got.numel() and got.isfinite().all() and exact.isfinite().all()):
        return ""
    difference = got - exact
    wrong = difference.abs() > limit
    if not got.any():
        return "it is zero everywhere: a term or a gradient is missing"
    for cause in (
        _mask(got, exact, wrong),
        _tail(wrong),
        _factor(got, exact, wrong),
        _swapped(got, exact, limit),
        _offset(difference, wrong),
    ):
        if cause:
            return cause
    missing = wrong & (got == 0)
    if missing.sum() * 2 >= wrong.sum() and missing.any():
        return "where it differs it is zero: something was dropped, or never written"
    if here := _circumstance(what):
        return here
    if difference.abs().max() < 0.05 * exact.abs().max():
        return "it is near: a sum in too few digits, or a difference of large numbers that cancel"
    return ""


def _mask(got: Tensor, exact: Tensor, wrong: Tensor) -> str:
    """Zero where it should not be, and not zero where it should."""
    gone, come = wrong & (got == 0), wrong & (exact == 0)
    found = bool(gone.any() and come.any() and ((gone | come) == wrong).all())
    return "zeros are in other places: a mask was drawn again, or is another one" if found else ""


def _tail(wrong: Tensor) -> str:
    """Wrong from some row or column on, and right before it."""
    for what, dim in (("row", 0), ("column", wrong.dim() - 1)) if wrong.dim() > 1 else (("element", 0),):
        lines = wrong.movedim(dim, 0).flatten(1).any(1) if wrong.dim() > 1 else wrong
        first = int(lines.to(torch.uint8).argmax())
        if first > 0 and bool(lines[first:].all()):
            count = lines.shape[0]
            return f"only from {what} {first} of {count} on: a tail is not handled"
    return ""


def _factor(got: Tensor, exact: Tensor, wrong: Tensor) -> str:
    """A multiple of the right value."""
    norm = (exact * exact).sum()
    if not norm:
        return ""
    factor = ((got * exact).sum() / norm).item()
    rest = (got - factor * exact).abs().max()
    if rest > NEAR * (got - exact).abs().max() or abs(factor - 1) < 1e-3:
        return ""
    return f"it is {factor:.4g} times the right value: a scale is missing or applied twice, or a sum has a part twice"


def _swapped(got: Tensor, exact: Tensor, limit: float) -> str:
    """Halves of the last dimension in each other's place."""
    if exact.dim() == 0 or exact.shape[-1] % 2:
        return ""
    first, second = exact.chunk(2, -1)
    near = (got - torch.cat([second, first], -1)).abs().max() <= limit
    return "the halves of the last dimension are swapped" if near else ""


def _offset(difference: Tensor, wrong: Tensor) -> str:
    """The same difference in each row."""
    rows = difference.flatten(0, -2) if difference.dim() > 1 else difference.unsqueeze(0)
    if rows.shape[0] < 2 or not wrong.any():
        return ""
    same = (rows - rows[:1]).abs().max() <= NEAR * rows.abs().max()
    return "the difference is the same in each row: a bias is left out, or added twice" if same else ""


#: What it means that a comparison under these circumstances is the first to fail, by words of its name.
_CIRCUMSTANCES = (
    ("random case", "only for these shapes, strides or this dtype: something takes its tensors to be others"),
    ("rank ", "only for this rank: something takes x to be a matrix"),
    ("as float16", "only in float16: something goes through another dtype, or overflows"),
    ("zero-stride", "only with an expanded incoming gradient: something takes it to be dense"),
    ("incoming gradient", "only with this layout: something takes the incoming gradient to be contiguous"),
    ("expanded input", "only with an expanded input: something takes it to be dense"),
    ("input", "only with this layout: something takes an input to be contiguous"),
    ("large mean", "only for values far from zero: a mean of squares cancels, so subtract the mean first"),
    ("bfloat16", "only in few digits: a sum is accumulated in the narrow dtype"),
    ("rows", "only for this number of rows: a tail is not handled"),
)


def _circumstance(what: str) -> str:
    """What the name of a comparison, `circumstance: value`, says about the cause; empty if nothing."""
    name, colon, _ = what.partition(": ")
    return next((text for word, text in _CIRCUMSTANCES if word in name), "") if colon else ""
