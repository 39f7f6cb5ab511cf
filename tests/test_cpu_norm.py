"""The C++ norms and what is fused with them, against their torch bodies and float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_cpu_math import SHAPES, Call, check, dtypes
from torch import Tensor

from fusible import kernels
from fusible.kernels import add_norm, library, norm
from fusible.kernels.dropout import dropout_mask
from fusible.tolerance import same

pytestmark = pytest.mark.skipif(not library.load(), reason=f"the C++ kernels are {library.why_not()}")

EPS = 1e-5


def calls(
    x: Tensor, other: Tensor, dy: Tensor, gain: Tensor | None, shift: Tensor | None, zero: bool
) -> Iterator[Call]:
    """Each kernel of norms on these tensors; the records are torch's."""
    _, mean, rstd = kernels.layer_norm.body(x, gain, shift, EPS, 1, zero)
    _, rms = kernels.rms_norm.body(x, gain, EPS, 1, zero)
    _, inverse = kernels.l2_norm.body(x, EPS)
    yield Call(norm.layer_norm, (x, gain, shift, EPS, 1, zero), mean=1)
    yield Call(norm.rms_norm, (x, gain, EPS, 1, zero))
    yield Call(norm.l2_norm, (x, EPS))
    yield Call(norm.dl2_norm, (dy, x, inverse))
    yield Call(add_norm.add_layer_norm, (x, other, gain, shift, EPS, 1, zero), mean=1)
    yield Call(add_norm.add_rms_norm, (x, other, gain, EPS, 1, zero))
    weight, bias = gain is not None, shift is not None
    yield Call(norm.dlayer_norm, (dy, x, mean, rstd, gain, zero, True, weight, bias), sums=(1, 2))
    yield Call(norm.drms_norm, (dy, x, rms, gain, zero, True, weight), sums=(1,))
    yield Call(add_norm.dlayer_norm_add, (dy, x, mean, rstd, gain, other, zero, weight, bias), sums=(1, 2))
    yield Call(add_norm.drms_norm_add, (dy, x, rms, gain, other, zero, weight), sums=(1,))
    for center, extra in ((mean, other), (None, None)):
        statistic, b = (rms, None) if center is None else (rstd, shift)
        arguments = dy, x, center, statistic, gain, b, extra, zero, weight, b is not None
        yield Call(add_norm.dnorm_recompute, arguments, sums=(1, 2))


def tensors(n: int, w: int, dtype: torch.dtype, scale: float = 1.0, shift: float = 0.0) -> list[Tensor]:
    return [(scale * torch.randn(n, w) + shift).to(dtype) for _ in range(3)]


@dtypes
def test_values_at_every_width(dtype):
    for turn, (n, w) in enumerate(SHAPES):
        gain, shift = (torch.randn(w).to(dtype) for _ in range(2))
        if turn % 3 == 2:
            gain = shift = None
        for call in calls(*tensors(n, w, dtype), gain, shift, zero=turn % 2 == 1):
            check(call, f"{n}x{w}")


@pytest.mark.parametrize("shift", [3.0, 1e3, 1e6])
@pytest.mark.parametrize("scale", [1e-6, 1.0])
def test_large_means(scale, shift):
    """A variance by the mean of squares would have no digits left."""
    for first in (0.0, 50.0):
        x = (scale * torch.randn(7, 500, dtype=torch.float64) + shift).float()
        x[:, :16] += first  # a pivot taken here is far from the mean
        y, mean, rstd = Call(norm.layer_norm, (x, None, None, EPS)).ours()
        exact = torch.nn.functional.layer_norm(x.double(), (500,), eps=EPS)
        std = 1 / rstd.double()
        assert (mean.double() - x.double().mean(-1, keepdim=True)).abs().max() <= 2**-22 * (shift + first)
        assert ((y.double() - exact) * std).abs().max() <= 2**-21 * (shift + first + 1)
        assert ((std**2 - EPS - x.double().var(-1, keepdim=True, correction=0)).abs() <= 1e-5 * std**2 + 1e-12).all()


@dtypes
def test_constant_rows(dtype):
    x = torch.full((3, 65), 7.0).to(dtype)
    y, mean, rstd = Call(norm.layer_norm, (x, None, None, EPS)).ours()
    assert torch.equal(y, torch.zeros_like(y))
    assert torch.equal(mean, torch.full_like(mean, 7.0))
    torch.testing.assert_close(rstd, torch.full_like(rstd, EPS**-0.5))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinities_pass_as_in_torch(value):
    x, other, dy = tensors(5, 33, torch.float32)
    x[2, 20] = value
    gain, shift = torch.randn(33), torch.randn(33)
    for call in calls(x, other, dy, gain, shift, zero=False):
        for ours, plain in zip(call.ours(), call.plain(), strict=True):
            if ours is not None:
                assert torch.equal(ours.isfinite(), plain.isfinite()), call.kernel.name


def test_any_number_of_threads_gives_the_same_bits():
    x, other, dy = tensors(1025, 129, torch.float32)
    gain, shift, seed = torch.randn(129), torch.randn(129), torch.tensor([3, 4])
    _, mean, rstd = kernels.layer_norm.body(x, gain, shift, EPS)
    drop = Call(add_norm.ddropout_add_norm, (dy, x, mean, rstd, gain, other, seed, 1.25))
    every = [*calls(x, other, dy, gain, shift, zero=False), drop]
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append([call.ours() for call in every])
    finally:
        torch.set_num_threads(before)
    for results in found[1:]:
        for mine, first in zip(results, found[0], strict=True):
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(mine, first, strict=True))


@dtypes
@pytest.mark.parametrize("center", [True, False], ids=["layer", "rms"])
def test_dropout_add_norm(dtype, center):
    """As the norm of the masked sum, with the mask that `dropout_mask` makes of the seed; backward the same."""
    for n, w in [(1, 1), (7, 33), (65, 300)]:
        x, residual, dy = tensors(n, w, dtype)
        gain, shift = torch.randn(w).to(dtype), torch.randn(w).to(dtype) if center else None
        y, mean, rstd, total, seed = Call(
            add_norm.dropout_add_norm, (x, residual, 0.2, gain, shift, EPS, 1, False, center)
        ).ours()
        mask = dropout_mask(x, seed, 1.25)
        expected = (x.double() * mask * 1.25 + residual.double()).to(dtype)
        torch.testing.assert_close(total, expected)
        arguments = (total, gain, shift, EPS) if center else (total, gain, EPS)
        check_same(Call(norm.layer_norm if center else norm.rms_norm, arguments).ours()[0], y)
        call = Call(
            add_norm.ddropout_add_norm, (dy, total, mean, rstd, gain, residual, seed, 1.25, False, True, center)
        )
        dropped, dx, *sums = call.ours()
        plain = Call(
            add_norm.dnorm_recompute, (dy, total, mean, rstd, gain, shift, residual, False, True, center)
        ).ours()
        for mine, theirs in zip((dx, *sums), plain[:3], strict=True):
            assert mine is theirs is None or torch.equal(mine, theirs)
        torch.testing.assert_close(dropped, (dx.double() * mask * 1.25).to(dtype))


def check_same(a: Tensor, b: Tensor) -> None:
    assert same(a, b)


def test_what_does_not_fit_is_refused():
    x = torch.randn(4, 8)
    wide = x.double()
    for kernel, args in (
        (add_norm.add_rms_norm, (x, wide, None, EPS)),
        (add_norm.add_layer_norm, (x, x[:3], None, None, EPS)),
        (norm.drms_norm, (wide, x, x[:, :1], None)),
        (add_norm.drms_norm_add, (x, x, x[:, :1], None, x[:2])),
        (add_norm.ddropout_add_norm, (x, x, None, x[:, :1], None, None, torch.tensor([1]), 2.0)),
    ):
        with pytest.raises(RuntimeError, match="fusible: "):
            Call(kernel, args).ours()
