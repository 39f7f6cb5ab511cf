"""C++ activations, gated activations and dropout against their torch bodies and float64: see `fusible/csrc`.

No rows: these are kernels, whose arguments no op's row reaches one by one (widths around the vector length, layouts,
numbers of threads, infinities).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fusible.kernels import activation, gated, library
from fusible.kernels.cpu import activation as cpu_activation
from fusible.kernels.dropout import ddropout, dropout, dropout_add, dropout_mask, philox
from fusible.kernels.registry import Kernel
from fusible.tolerance import NEARBY, coarsest_dtype, compare, moved, same

pytestmark = pytest.mark.skipif(not library.load(), reason=f"the C++ kernels are {library.why_not()}")

WIDTHS = (1, 3, 31, 33, 63, 65, 127, 129, 1000, 4099)
SHAPES = [*((7, w) for w in WIDTHS), (0, 33), (1, 65), (1, 1000), (1025, 1), (1025, 3), (1025, 33), (1025, 129)]
LAYOUTS = ((True, None), (False, None), (True, 1), (False, 3))
OPTIONS: dict[str, list[tuple]] = {
    "geglu": [("none",), ("tanh",)],
    "clamped_swiglu": [(), (0.7, 1.5, 0.5)],
    "situ_glu": [(), (0.5, 2.0)],
}
KEEPS_Y = ("relu", "sigmoid", "tanh")
dtypes = pytest.mark.parametrize("dtype", library.FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def no_small_calls_by_torch(monkeypatch):
    """Small calls that would be torch's are ours too."""
    monkeypatch.setattr(cpu_activation, "_SMALL", {})


class Call(NamedTuple):
    kernel: Kernel
    args: tuple[Any, ...]
    #: Which results are sums over rows.
    sums: tuple[int, ...] = ()
    #: Which result is the mean of x's rows: right in units of x's values, whatever they add up to.
    mean: int | None = None

    def ours(self) -> tuple[Tensor | None, ...]:
        (body,) = [b.body for b in self.kernel.backends if b.name == "cpu"]
        return _tuple(body(*self.args))

    def nearby(self) -> list[tuple[Tensor | None, ...]]:
        """The float64 results for tensors that are within a rounding error of the given ones."""
        eps = torch.finfo(coarsest_dtype([arg for arg in self.args if isinstance(arg, Tensor)])).eps
        generator = torch.Generator().manual_seed(0)

        def near(arg: Any) -> Any:
            return moved(_double(arg), eps, generator) if isinstance(arg, Tensor) else arg

        return [_tuple(self.kernel.body(*map(near, self.args))) for _ in range(NEARBY)]

    def plain(self, *, double: bool = False) -> tuple[Tensor | None, ...]:
        return _tuple(self.kernel.body(*map(_double, self.args) if double else self.args))


def _tuple(result: Any) -> tuple[Tensor | None, ...]:
    return result if isinstance(result, tuple) else (result,)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def activation_calls(x: Tensor, dy: Tensor, bias: Tensor) -> Iterator[Call]:
    for act, (forward, _, backward) in activation.ACTIVATIONS.items():
        for options in [("none",), ("tanh",)] if act == "gelu" else [()]:
            record = forward.body(x) if act in KEEPS_Y else x
            yield Call(forward, (x, *options))
            yield Call(backward, (dy, record, *options))
            yield Call(activation.bias_act, (x, bias, act, *options))
            yield Call(activation.dact_dbias, (dy, record, act, *options), sums=(1,))
            if record is x:
                yield Call(activation.dact_recompute, (dy, x, act, *options))


def gated_calls(x: Tensor, dy: Tensor, bias: Tensor, turn: int = 0) -> Iterator[Call]:
    """Each gated activation in one layout, another one each turn."""
    width = dy.shape[-1]
    for i, (act, (forward, backward)) in enumerate(gated.GATED.items()):
        gate_first, interleave = LAYOUTS[(i + turn) % len(LAYOUTS)]
        if interleave is not None and width % interleave:
            interleave = width
        choices = OPTIONS.get(act, [()])
        options = choices[turn // len(LAYOUTS) % len(choices)]
        arguments = () if act == "glu" else (gate_first, interleave, *options)
        yield Call(forward, (x, *arguments))
        yield Call(backward, (dy, x, *arguments))
        yield Call(gated.bias_gated, (x, bias, act, *arguments))
        yield Call(gated.dgated_dbias, (dy, x, act, None, *arguments), sums=(1,))
        yield Call(gated.dgated_recompute, (dy, x, act, *arguments))


def all_calls(n: int, w: int, dtype: torch.dtype, turn: int = 0) -> Iterator[Call]:
    x, dy, bias = torch.randn(n, w).to(dtype), torch.randn(n, w).to(dtype), torch.randn(w).to(dtype)
    yield from activation_calls(x, dy, bias)
    x, bias = torch.randn(n, 2 * w).to(dtype), torch.randn(2 * w).to(dtype)
    yield from gated_calls(x, dy, bias, turn)


def compare_sum(what: str, ours: Tensor, plain: Tensor, exact: Tensor, terms: Tensor) -> None:
    """Rounding errors of n terms add up at random: some eps of their root sum of squares, whatever the sum itself
    is."""
    assert ours.dtype == plain.dtype
    assert ours.shape == plain.shape
    if ours.numel():
        noise = 6 * torch.finfo(ours.dtype).eps * terms.double().norm(dim=0).max()
        limit = max(2 * (plain.double() - exact).abs().max(), noise)
        error = (ours.double() - exact).abs().max()
        assert error <= limit, f"{what} is off by {error:.3g}, allowed {limit:.3g}"


def check(call: Call, what: str) -> None:
    ours, plain, exact = call.ours(), call.plain(), call.plain(double=True)
    options = [value for value in call.args[2:] if not isinstance(value, Tensor)]
    for i, (a, b, c) in enumerate(zip(ours, plain, exact, strict=True)):
        name = f"{call.kernel.name} {what} {options} result {i}"
        if a is None or b is None or c is None:
            assert a is b is c is None, name
        elif i == call.mean:
            eps = torch.finfo(coarsest_dtype([call.args[0], a])).eps
            assert ((a.double() - c).abs() <= eps * (4 + c.abs())).all(), name
        elif i in call.sums and c.dtype is not a.dtype:
            compare_sum(name, a, b, c, exact[0].reshape(-1, exact[0].shape[-1]))
        else:
            compare(name, a, b, c, nearby=lambda i=i: [near[i] for near in call.nearby()])


@dtypes
def test_values_at_every_width(dtype):
    for turn, (n, w) in enumerate(SHAPES):
        for call in all_calls(n, w, dtype, turn):
            check(call, f"{n}x{w}")


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 10.0, 100.0])
def test_values_of_small_and_large_inputs(scale):
    dtypes = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
    for turn, dtype in enumerate(dtypes if scale < 100 else dtypes[:-1]):  # squares would not fit into float16
        x, dy, bias = (
            (scale * torch.randn(64, 128)).to(dtype),
            torch.randn(64, 128).to(dtype),
            torch.zeros(128).to(dtype),
        )
        calls = (*activation_calls(x, dy, bias), *gated_calls(x, dy[:, :64], bias, turn))
        for call in calls:
            check(call, f"{scale} {dtype}")


#: Formulas that keep their relative precision in float64, where torch's GELU loses it in the tail.
EXACT = [
    (activation.gelu, ("none",), lambda x: x * torch.special.erfc(-x / 2**0.5) / 2),
    (activation.gelu, ("tanh",), lambda x: x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    (activation.silu, (), lambda x: x * torch.sigmoid(x)),
    (activation.qgelu, (), lambda x: x * torch.sigmoid(1.702 * x)),
    (activation.tanh, (), torch.tanh),
    (activation.sigmoid, (), torch.sigmoid),
]
exactly = pytest.mark.parametrize(("kernel", "options", "formula"), EXACT, ids=lambda value: str(value)[:14])


@exactly
@pytest.mark.parametrize(
    ("dtype", "eps"), [(torch.float32, 2**-23), (torch.float64, 2**-52)], ids=["float32", "float64"]
)
def test_relative_errors_near_zero(kernel, options, formula, dtype, eps):
    """Between 1e-30 and 1 the result is right in relative terms, to 3 units in its last place (float64: to 8)."""
    x = torch.logspace(-30, 0, 100_000, dtype=torch.float64).to(dtype)
    x = torch.cat((x, -x))
    (ours,) = Call(kernel, (x, *options)).ours()
    exact = formula(x.double())
    assert ((ours.double() - exact) / exact).abs().max() < eps * (3 if dtype is torch.float32 else 8)


@exactly
def test_the_whole_range_of_float32(kernel, options, formula):
    """From every binade: finite where float64 is, and never far in relative terms, but 0 instead of what is below
    1e-36."""
    x = torch.arange(-(2**31), 2**31, 2**31 // 500_021, dtype=torch.int64).to(torch.int32).view(torch.float32)
    x = x[x.isfinite()]
    (ours,) = Call(kernel, (x, *options)).ours()
    exact = formula(x.double())
    exact[x < -1e12] = 0 if kernel in (activation.gelu, activation.silu, activation.qgelu, activation.sigmoid) else -1
    assert ours.isfinite().all()
    relative = torch.where(x < -5.5, 0.02 if kernel is activation.gelu else 1.5e-5, 1.5e-5)
    assert ((ours.double() - exact).abs() <= 2e-36 + relative * exact.abs()).all()


INFINITE = [
    0.0,
    -0.0,
    torch.inf,
    -torch.inf,
    torch.nan,
    1e3,
    -1e3,
    100.0,
    -100.0,
    88.9,
    -88.9,
    -87.5,
    20.0,
    -20.0,
    3.0,
    -3.0,
]


@dtypes
def test_infinities_and_nan_as_in_torch(dtype):
    """GELU as in torch's own loops, to which the torch body keeps for small tensors; oneDNN's is NaN at infinity."""
    x = torch.tensor(INFINITE).repeat(4, 3).to(dtype)
    dy = torch.randn(x.shape).to(dtype)
    for act, (forward, in_place, backward) in activation.ACTIVATIONS.items():
        for options in [("none",), ("tanh",)] if act == "gelu" else [()]:
            plain = forward.body(x, *options)
            record = plain if act in KEEPS_Y else x
            for kernel, args in ((forward, (x,)), (in_place, (x.clone(),)), (backward, (dy, record))):
                expected = kernel.body(*(a.clone() for a in args), *options)
                (ours,) = Call(kernel, (*args, *options)).ours()
                _same_specials(f"{kernel.name} {options}", ours, expected)
    pairs = torch.tensor(list(itertools.product(INFINITE, INFINITE))).T.flatten().repeat(2, 1).to(dtype)
    dy = torch.randn(2, pairs.shape[-1] // 2).to(dtype)
    for act, (forward, backward) in gated.GATED.items():
        for arguments in [()] if act == "glu" else [(True, None, *o) for o in OPTIONS.get(act, [()])]:
            for kernel, args in ((forward, (pairs,)), (backward, (dy, pairs))):
                wide = [
                    a.to(torch.promote_types(dtype, torch.float32)) for a in args
                ]  # no product overflows sixteen bits
                expected = kernel.body(*wide, *arguments).to(dtype)
                (ours,) = Call(kernel, (*args, *arguments)).ours()
                _same_specials(f"{kernel.name} {arguments}", ours, expected, gated=True)


def _same_specials(what: str, ours: Tensor, expected: Tensor, gated: bool = False) -> None:
    if gated:  # 0 times infinity where torch's gate has lost its last digits, and a small number is not 0
        expected = torch.where(expected.isnan() & ours.isinf(), ours, expected)
    for name, kind in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differ = (kind(ours) != kind(expected)).nonzero()
        assert not len(differ), f"{what}: {name} elsewhere than in torch, first at {differ[0].tolist()}"


@dtypes
def test_in_place_is_the_same(dtype):
    for shape in ((0, 5), (7, 33), (3, 1000), (1025, 3)):
        x, bias = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
        for act, (forward, in_place, _) in activation.ACTIVATIONS.items():
            over = x.clone()
            (y,) = Call(in_place, (over,)).ours()
            assert y is over
            assert same(y, Call(forward, (x,)).ours()[0])
            y, pre = Call(activation.bias_act, (x, bias, act)).ours()
            for keep in (True, False):
                over = x.clone()
                got, kept = Call(activation.bias_act_, (over, bias, act, "none", keep)).ours()
                assert same(got, y)
                assert (kept if keep else got) is over
                assert same(kept, pre) if keep else kept is None
            got, kept = Call(activation.bias_act, (x, bias, act, "none", False)).ours()
            assert kept is None
            assert same(got, y)
        x, bias = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype), torch.randn(2 * shape[-1]).to(dtype)
        y, pre = Call(gated.bias_gated, (x, bias, "swiglu")).ours()
        over = x.clone()
        got, kept = Call(gated.bias_gated_, (over, bias, "swiglu")).ours()
        assert kept is over
        assert same(got, y)
        assert same(kept, pre)


def _layouts(t: Tensor) -> Iterator[Tensor]:
    """The same values, laid out otherwise."""
    n, w = t.shape
    yield t.new_empty(n, w + 5)[:, :w].copy_(t)
    yield t.t().contiguous().t()
    yield t.new_empty(2 * n, w)[::2].copy_(t)
    yield t.new_empty(n, 2 * w)[:, ::2].copy_(t)


@dtypes
def test_strided_and_expanded_inputs(dtype):
    for call in all_calls(6, 50, dtype):
        expected = call.ours()
        tensors = [isinstance(a, Tensor) and a.dim() == 2 for a in call.args]
        for others in zip(
            *(_layouts(a) for a, is_tensor in zip(call.args, tensors, strict=True) if is_tensor), strict=True
        ):
            queue = iter(others)
            args = tuple(next(queue) if is_tensor else a for a, is_tensor in zip(call.args, tensors, strict=True))
            for ours, same_values in zip(call._replace(args=args).ours(), expected, strict=True):
                assert same_values is not None
                assert ours.is_contiguous()
                tolerance = 4 * torch.finfo(dtype).eps
                torch.testing.assert_close(ours, same_values, rtol=tolerance, atol=16 * tolerance)
    dy = torch.ones((), dtype=dtype).expand(6, 50)
    for expanded in (dy, torch.randn(50).to(dtype).expand(6, 50), torch.randn(6, 1).to(dtype).expand(6, 50)):
        record, x = torch.randn(6, 50).to(dtype), torch.randn(6, 100).to(dtype)
        for kernel, other in ((activation.dsilu, record), (gated.dswiglu, x)):
            assert same(Call(kernel, (expanded, other)).ours()[0], Call(kernel, (expanded.clone(), other)).ours()[0])


def test_leading_dimensions():
    x, dy, bias = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8), torch.randn(8)
    for call in (*activation_calls(x, dy, bias), *gated_calls(x, dy[..., :4], bias)):
        check(call, "rank 4")
    for call in (*activation_calls(x[0, 0, 0], dy[0, 0, 0], bias), *gated_calls(x[0, 0, 0], dy[0, 0, 0, :4], bias)):
        check(call._replace(sums=()), "rank 1")


def test_any_number_of_threads_gives_the_same_bits():
    calls = [
        *all_calls(1025, 129, torch.float32),
        *all_calls(300, 1000, torch.bfloat16, 1),
        *all_calls(40_000, 3, torch.float32, 2),
    ]
    seed = torch.tensor([5, 6])
    x, residual = torch.randn(1025, 129), torch.randn(1025, 129)
    calls += [Call(ddropout, (x, seed, 1.25))]
    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append([call.ours() for call in calls])
        torch.manual_seed(3)
        results[-1] += [Call(dropout, (x, 0.3)).ours(), Call(dropout_add, (x, residual, 0.3)).ours()]
    for other in results[1:]:
        for mine, first in zip(other, results[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, first, strict=True))


def test_gradient_of_the_bias_has_the_dtype_asked_for():
    dy, x = torch.randn(9, 4).bfloat16(), torch.randn(9, 4).bfloat16()
    for dtype in library.FLOATS:
        for call in (Call(activation.dact_dbias, (dy, x, "silu", "none", dtype)),
                     Call(gated.dgated_dbias, (dy[:, :2], x, "swiglu", dtype))):  # fmt: skip
            assert call.ours()[1].dtype is call.plain()[1].dtype is dtype


def test_sums_of_many_rows_stay_exact():
    """300 000 equal rows: sums of float32 in one run would be off by 1e-3."""
    dy, x = torch.ones(300_000, 2), torch.full((300_000, 2), 0.7)
    for call in (Call(activation.dact_dbias, (dy, x, "silu")), Call(gated.dgated_dbias, (dy[:, :1], x, "swiglu"))):
        dx, dbias = call.ours()
        torch.testing.assert_close(dbias.double(), dx.double().sum(0), rtol=1e-6, atol=0)


#: Known answers of Philox4x32-10 from the paper's own test vectors: block, key, stream, words.
KNOWN = [
    (0, 0, 0, ("6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8")),
    (-1, -1, -1, ("408f276d", "41c83b0e", "a20bc7c6", "6d5451fd")),
    (
        0x85A308D3243F6A88 - 2**64,
        0x299F31D0A4093822,
        0x0370734413198A2E,
        ("d16cfe09", "94fdcceb", "5001e420", "24126ea1"),
    ),
]


def test_philox_is_philox():
    for block, key, stream, words in KNOWN:
        got = philox(torch.tensor([block]), key, stream)
        assert [f"{word:08x}" for word in got[0].tolist()] == list(words)


@dtypes
def test_dropout_makes_the_masks_of_its_formula(dtype):
    for n, w in (*SHAPES, (40, 1001)):
        x, residual = torch.randn(n, w).to(dtype), torch.randn(n, w).to(dtype)
        for p in (1e-6, 0.3, 0.999999):
            (y, seed), scale = Call(dropout, (x, p)).ours(), 1 / (1 - p)
            mask = dropout_mask(x, seed, scale)
            wide = torch.promote_types(dtype, torch.float32)
            assert same(y, (x.to(wide) * (mask.to(wide) * scale)).to(dtype))
            (dx,) = Call(ddropout, (residual, seed, scale)).ours()
            assert same(dx, (residual.to(wide) * (mask.to(wide) * scale)).to(dtype))
            assert same(ddropout.body(x, mask, scale), ddropout.body(x, seed, scale))
            compare("dropout of a kept mask", Call(ddropout, (x, mask, scale)).ours()[0], ddropout.body(x, mask, scale),
                    x.double() * mask * scale)  # fmt: skip
            y, seed = Call(dropout_add, (x, residual, p)).ours()
            exact = x.double() * dropout_mask(x, seed, scale) * scale + residual.double()
            plain = ((x * dropout_mask(x, seed, scale)).mul_(scale)).add_(residual)
            compare(f"dropout_add {n}x{w}", y, plain, exact)


def test_dropout_of_strided_inputs_takes_elements_in_their_order():
    x, seed = torch.randn(6, 50), torch.tensor([7, 8])
    (expected,) = Call(ddropout, (x, seed, 2.0)).ours()
    for other in _layouts(x):
        assert torch.equal(Call(ddropout, (other, seed, 2.0)).ours()[0], expected)


def test_dropout_is_random_and_follows_the_seed():
    x = torch.ones(512, 2048)
    torch.manual_seed(11)
    y, _ = Call(dropout, (x, 0.25)).ours()
    other, _ = Call(dropout, (x, 0.25)).ours()
    assert not torch.equal(y, other)
    torch.manual_seed(11)
    assert torch.equal(Call(dropout, (x, 0.25)).ours()[0], y)
    kept = (y != 0).double()
    sigma = (0.25 * 0.75) ** 0.5
    assert abs(kept.mean() - 0.75) < 5 * sigma / kept.numel() ** 0.5
    assert (kept.mean(0) - 0.75).abs().max() < 6 * sigma / 512**0.5
    assert (kept.mean(1) - 0.75).abs().max() < 6 * sigma / 2048**0.5
    both = (kept - 0.75) * ((other != 0).double() - 0.75)
    shifted = (kept[:, 1:] - 0.75) * (kept[:, :-1] - 0.75)
    for product in (both, shifted):
        assert abs(product.mean()) < 5 * sigma**2 / product.numel() ** 0.5


def test_dropped_nan_and_infinity_stay():
    """As torch's, which multiplies by the mask."""
    x = torch.tensor([torch.inf, -torch.inf, torch.nan]).repeat(100)
    y, seed = Call(dropout, (x, 0.5)).ours()
    mask = dropout_mask(x, seed, 2.0)
    assert same(y.nan_to_num(7, 8, 9), (x * mask * 2).nan_to_num(7, 8, 9))


def test_small_calls_are_the_same_but_for_rounding(monkeypatch):
    """On both sides of where the bodies change from torch's operators to ours."""
    monkeypatch.undo()
    for elements in cpu_activation._SMALL.values():
        x = torch.randn(3, elements // 3 + 1)
        for part in (x, x[:2]):
            for act, (forward, in_place, _) in activation.ACTIVATIONS.items():
                for options in [("none",), ("tanh",)] if act == "gelu" else [()]:
                    check(Call(forward, (part, *options)), f"{part.shape}")
                    over = part.clone()
                    assert Call(in_place, (over, *options)).ours()[0] is over
                    assert same(over, Call(forward, (part, *options)).ours()[0])


def test_what_does_not_fit_is_refused():
    x, wide = torch.randn(4, 8), torch.randn(4, 8).double()
    for kernel, args in ((activation.dsilu, (wide, x)), (activation.dsilu, (x[:3], x)), (gated.dswiglu, (x, x)),
                         (activation.bias_act, (x, x[0, :7], "silu")), (gated.bias_gated, (x, x[0, :4], "swiglu")),
                         (activation.dact_dbias, (wide, x, "silu")), (gated.swiglu, (x[:, :7],)),
                         (ddropout, (x, torch.tensor([1]), 2.0))):  # fmt: skip
        with pytest.raises(RuntimeError, match="fusible: "):
            Call(kernel, args).ours()
