"""Cross entropy: its kernels against their torch bodies and float64, its errors, and what it costs.

No rows: these are kernels' arguments that no op's row reaches (widths around the vector length, infinities, several
chunks), numbers of matrix products, and texts of errors that come from values.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fusible
from fusible import kernels, ops
from fusible.kernels import Targets, Wanted, library
from fusible.testing import check
from fusible.tolerance import NEARBY, compare, moved, same

chunked = importlib.import_module("fusible.kernels.linear_cross_entropy")
needs_kernels = pytest.mark.skipif(not library.load(), reason=f"the C++ kernels are {library.why_not()}")
dtypes = pytest.mark.parametrize("dtype", library.FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
BACKENDS = ["reference", pytest.param("cpu", marks=needs_kernels)]
backends = pytest.mark.parametrize("backend", BACKENDS)

INF, NAN = torch.inf, torch.nan
WIDTHS = (2, 3, 15, 17, 63, 65, 511, 513, 1000)
#: label_smoothing, z_loss, soft_cap
OPTIONS = [(0.0, 0.0, 0.0), (0.1, 0.0, 0.0), (0.0, 0.01, 3.0), (1.0, 0.01, 0.0), (0.2, 0.01, 3.0)]


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def drawn(n: int, v: int, dtype: torch.dtype, options: tuple, weighted: bool) -> tuple[Tensor, Targets, Tensor]:
    """Logits, targets of which the third is ignored, and a scale for each row."""
    target = torch.randint(0, v, (n,))
    target[2:3] = -100
    weight = torch.rand(v, dtype=wide(dtype)) if weighted else None
    total = float(v) if weight is None else float(weight.double().sum())
    x = (3 * torch.randn(n, v)).to(dtype)
    return x, Targets(target, weight, total, -100, *options), torch.randn(n, dtype=wide(dtype))


def doubled(targets: Targets) -> Targets:
    weight = targets.class_weight
    return targets._replace(class_weight=None if weight is None else weight.double())


def all_results(backend: str, x: Tensor, targets: Targets, scale: Tensor) -> list[Tensor]:
    """Losses and gradients by each kernel."""
    with kernels.use(backend):
        loss, stats = kernels.cross_entropy(x, targets)
        dx = kernels.dcross_entropy(x, targets, stats, scale)
        over, again = x.clone(), x.clone()
        both = kernels.cross_entropy_(over, targets, scale)
        return [loss, dx, both, over, kernels.dcross_entropy_(again, targets, stats, scale)]


@needs_kernels
@dtypes
def test_values_at_every_width(dtype):
    generator = torch.Generator().manual_seed(0)
    for turn, (v, options) in enumerate(itertools.product(WIDTHS, OPTIONS)):
        x, targets, scale = drawn(5, v, dtype, options, turn % 2 == 1)
        ours = all_results("cpu", x, targets, scale)
        plain = all_results("reference", x, targets, scale)
        exact = all_results("reference", x.double(), doubled(targets), scale.double())
        for i, (a, b, c) in enumerate(zip(ours, plain, exact, strict=True)):

            def nearby(i: int = i) -> list[Tensor]:
                near = [moved(t.double(), torch.finfo(wide(dtype)).eps, generator) for t in (x, scale)]
                return [all_results("reference", near[0], doubled(targets), near[1])[i] for _ in range(NEARBY)]

            compare(f"{v} classes, {options}, {dtype}: result {i}", a, b, c, nearby=nearby)


def torch_loss(x: Tensor, target: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and gradient by torch."""
    leaf = x.detach().clone().requires_grad_()
    loss = F.cross_entropy(leaf, target, reduction="none")
    return loss.detach(), torch.autograd.grad(loss, leaf, scale)[0]


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.quick
def test_infinities_nan_and_huge_logits_as_torch(dtype, backend):
    rows = [
        [1.0, -INF, 2.0, 0.0], [-INF, -INF, 2.0, -INF], [-INF] * 4, [INF, 0.0, 1.0, 2.0], [NAN, 0.0, 1.0, 2.0],
        [1e4, -1e4, 9990.0, 1e4], [3e38, -3e38, 3e38, 0.0], [-90.0, 0.0, -104.0, -800.0], [1e30, INF, -INF, NAN],
    ]  # fmt: skip
    for places in range(4):
        x = torch.tensor(rows, dtype=dtype).repeat(1, 10)  # longer than a vector, and a tail
        target = torch.full((len(rows),), places)
        scale = torch.rand(len(rows), dtype=dtype) + 0.5
        right, right_dx = torch_loss(x, target, scale)
        targets = Targets(target, None, float(x.shape[1]))
        with kernels.use(backend):
            loss, stats = kernels.cross_entropy(x, targets)
            gradients = [kernels.dcross_entropy(x, targets, stats, scale), x.clone()]
            assert same(kernels.cross_entropy_(gradients[1], targets, scale), loss)
        torch.testing.assert_close(loss, right, equal_nan=True)
        for dx in gradients:
            torch.testing.assert_close(dx, right_dx, equal_nan=True, atol=1e-6, rtol=1e-5)


@backends
@pytest.mark.quick
def test_one_class_has_nothing_to_learn(backend):
    x, targets, scale = drawn(3, 1, torch.float32, (0.1, 0.0, 0.0), False)
    for result in all_results(backend, x, targets, scale):
        assert result.abs().max() < 1e-6


@needs_kernels
@pytest.mark.quick
def test_layouts_and_ranks():
    x, targets, scale = drawn(6, 40, torch.float32, (0.1, 0.01, 0.0), True)
    loss, stats = kernels.cross_entropy(x, targets)
    dx = kernels.dcross_entropy(x, targets, stats, scale)
    spread = torch.stack((targets.target, targets.target), -1)[:, 0]
    for other in (x.t().contiguous().t(), torch.cat((x, x), -1)[:, :40], x.repeat_interleave(2, 0)[::2]):
        again = targets._replace(target=spread)
        assert same(kernels.cross_entropy(other, again)[0], loss)
        assert same(kernels.dcross_entropy(other, again, stats, scale), dx)
    deep = targets._replace(target=targets.target.view(2, 3).t().contiguous().t())
    loss3, stats3 = kernels.cross_entropy(x.view(2, 3, 40), deep)
    assert same(loss3, loss.view(2, 3))
    assert same(kernels.dcross_entropy(x.view(2, 3, 40), deep, stats3, scale.view(2, 3)), dx.view(2, 3, 40))
    with pytest.raises(RuntimeError, match="dx must be contiguous"):
        kernels.cross_entropy_(x.t().contiguous().t(), targets, scale)


@needs_kernels
@pytest.mark.quick
def test_any_number_of_threads_gives_the_same_bits():
    x, targets, scale = drawn(37, 5000, torch.float32, (0.1, 0.0, 0.0), False)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append((kernels.cross_entropy_(y := x.clone(), targets, scale), y))
    assert all(same(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


@backends
@pytest.mark.quick
def test_count_targets(backend):
    weight = torch.tensor([1.0, 0.5, 4.0])
    with kernels.use(backend):
        assert kernels.count_targets(torch.tensor([0, 2, 7, 2]), None, 3, 7) == (-1, 3.0, 3.0)
        assert kernels.count_targets(torch.tensor([0, 2, 7, 2]), weight, 3, 7) == (-1, 9.0, 5.5)
        assert kernels.count_targets(torch.tensor([0, 7, 3, -1]), None, 3, 7)[0] == 2
        assert kernels.count_targets(torch.tensor([0, -1]), weight, 3, 7)[0] == 1
        assert kernels.count_targets(torch.tensor([7, 7]), None, 3, 7) == (-1, 0.0, 3.0)
        assert kernels.count_targets(torch.tensor([], dtype=torch.int64), None, 3, 7) == (-1, 0.0, 3.0)


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks of rows and panels of classes, none of which divides what there is."""
    monkeypatch.setattr(chunked, "MIN_ROWS", 4)
    monkeypatch.setattr(chunked, "CHUNK", 1)
    monkeypatch.setattr(chunked, "PANEL", 7)


@dtypes
@pytest.mark.parametrize("native", [True, False], ids=["native", "panels"])
def test_several_chunks(dtype, native, small_chunks, monkeypatch):
    """Against one chunk in float64, as each dtype's products allow."""
    if native and dtype is torch.float16:
        pytest.skip("float16 is multiplied in float32")
    monkeypatch.setattr(chunked, "_multiplies", lambda dtype: native)
    n, d, v = 13, 6, 23
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((n, d), (v, d), (v,)))
    targets = drawn(n, v, dtype, (0.1, 0.01, 2.0), True)[1]
    scale, scales = torch.tensor(0.3, dtype=wide(dtype)), torch.rand(n, dtype=wide(dtype))
    wanted = Wanted(True, True, True)

    def run(x: Tensor, weight: Tensor, bias: Tensor, targets: Targets, *scales: Tensor) -> list[Tensor]:
        losses, stats = kernels.linear_cross_entropy(x, weight, bias, targets)
        ahead = kernels.linear_cross_entropy_grads(x, weight, bias, targets, scales[0], wanted)
        return [losses, *ahead, *kernels.dlinear_cross_entropy(x, weight, bias, targets, stats, scales[1], wanted)]

    ours = run(x, weight, bias, targets, scale, scales)
    monkeypatch.undo()
    exact = run(x.double(), weight.double(), bias.double(), doubled(targets), scale.double(), scales.double())
    rounding = {torch.bfloat16: 3e-2}.get(dtype, 1e-5) if native else 1e-5
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype is wide(dtype)
        assert (a - b).abs().max() <= rounding * b.abs().max()


@pytest.mark.quick
def test_chunks_are_a_small_part_of_the_logits():
    """Without data: 15 % at 2048 rows and 32000 classes, and few rows where there are many classes."""
    for n, v, most in ((2048, 32000, 0.15), (4096, 262144, 0.07), (300, 1000, 1.0)):
        x, weight = torch.empty(n, 8, device="meta"), torch.empty(v, 8, device="meta")
        chunks = [
            (stop - start, logits.shape) for start, stop, logits in chunked._chunks(x, chunked._Whole(weight, None))
        ]
        assert sum(rows for rows, _ in chunks) == n
        assert all(shape == (rows, v) and rows <= max(1, most * n) for rows, shape in chunks)


@pytest.mark.quick
def test_a_huge_vocabulary():
    loss, plain = ops.LinearCrossEntropy(4, 262144), torch.empty(3, dtype=torch.int64).random_(262144)
    x = torch.randn(3, 4, requires_grad=True)
    right = F.cross_entropy(x @ loss.weight.t(), plain)
    mine = fusible.Sequential(loss)(x, plain)
    torch.testing.assert_close(mine, right)
    leaves = [x, loss.weight]
    for a, b in zip(torch.autograd.grad(mine, leaves), torch.autograd.grad(right, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.quick
def test_equals_torchs_own(reduction):
    """Values and gradients of `torch.nn.functional.linear_cross_entropy`, class weights and ignored rows among them."""
    weight = torch.rand(7)
    loss = ops.LinearCrossEntropy(5, 7, True, reduction, class_weight=weight, label_smoothing=0.1)
    x, target = torch.randn(9, 5, requires_grad=True), torch.randint(0, 7, (9,))
    target[4] = -100
    leaves = [x, loss.weight, loss.bias]
    right = F.linear_cross_entropy(x, loss.weight, target, linear_bias=loss.bias, weight=weight, reduction=reduction,
                                   label_smoothing=0.1)  # fmt: skip
    mine = fusible.Sequential(loss)(x, target)
    torch.testing.assert_close(mine, right)
    dy = torch.randn(right.shape)
    pairs = zip(torch.autograd.grad(mine, leaves, dy), torch.autograd.grad(right, leaves, dy), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [ops.CrossEntropy, lambda **options: ops.LinearCrossEntropy(6, 6, **options)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.quick
def test_all_rows_ignored_and_no_rows(kind, reduction):
    block = fusible.Sequential(kind(reduction=reduction, ignore_index=2, label_smoothing=0.1, z_loss=0.1))
    for n in (3, 0):
        x, target = torch.randn(n, 6, requires_grad=True), torch.full((n,), 2)
        right = F.cross_entropy(x, target, ignore_index=2, reduction=reduction, label_smoothing=0.1)
        y = block(x, target)
        torch.testing.assert_close(y.detach(), right.detach(), equal_nan=True)
        y.backward(torch.ones_like(y))
        assert not x.grad.any()
        assert all(p.grad is not None and not p.grad.any() for p in block.parameters())


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("reduction", "frozen", "forward", "backward"),
    [
        ("mean", "", 3, 0),
        ("sum", "weight", 2, 0),
        ("mean", "x", 2, 0),
        ("mean", "x weight", 1, None),
        ("none", "", 1, 3),
        ("none", "weight", 2, 0),
        ("none", "x", 1, 2),
    ],
)
@pytest.mark.quick
def test_products_that_nobody_wants_are_not_made(reduction, frozen, forward, backward):
    for joined in (False, True):
        if joined and reduction == "none":
            continue
        chain = (
            [ops.BasicLinear(5, 7), ops.CrossEntropy()]
            if joined
            else [ops.LinearCrossEntropy(5, 7, reduction=reduction)]
        )
        block = fusible.Sequential(*chain)
        block[0].weight.requires_grad_("weight" not in frozen)
        x = torch.randn(3, 5, requires_grad="x" not in frozen)
        with _Products() as made:
            y = block(x, torch.zeros(3, dtype=torch.int64))
        assert made.count == forward
        if backward is not None:
            with _Products() as made:
                y.backward(torch.ones_like(y))
            assert made.count == backward
        with torch.no_grad(), _Products() as made:
            block(x, torch.zeros(3, dtype=torch.int64))
        assert made.count == 1


@pytest.mark.quick
def test_gradients_of_a_retained_graph_are_their_own():
    """The gradients are kept from forward on; what the caller does to them must not reach the next backward."""
    block = fusible.Sequential(ops.LinearCrossEntropy(5, 7))
    x = torch.randn(3, 5, requires_grad=True)
    y = block(x, torch.tensor([0, 3, 6]))
    leaves = [x, block[0].weight]
    first = torch.autograd.grad(y, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    for gradient in first:
        gradient.zero_()
    tripled = torch.autograd.grad(y, leaves, torch.tensor(3.0), retain_graph=True)
    last = torch.autograd.grad(y, leaves)
    for a, b, c in zip(kept, tripled, last, strict=True):
        torch.testing.assert_close(3 * a, b)
        assert same(a, c)


@pytest.mark.quick
def test_tied_weight():
    """The loss's weight is another layer's."""
    block = fusible.Sequential(ops.Linear(6, 6, bias=False), ops.Tanh(), ops.LinearCrossEntropy(6, 6)).double()
    block[2].weight = block[0].weight
    assert len(list(block.parameters())) == 1
    check(block, torch.randn(4, 6, dtype=torch.float64), torch.tensor([1, -100, 5, 0]), gradcheck=True)


@pytest.mark.quick
def test_losses_of_narrow_logits_are_float32():
    target = torch.tensor([1, 2])
    for dtype in (torch.bfloat16, torch.float16):
        assert fusible.Sequential(ops.CrossEntropy())(torch.randn(2, 5).to(dtype), target).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        y = fusible.Sequential(ops.LinearCrossEntropy(5, 7))(torch.randn(2, 5), target)
    assert y.dtype is torch.float32


@pytest.mark.quick
def test_float16_gradients_do_not_underflow():
    """Kept between the passes in float32: before the loss is scaled they are below float16's range."""
    loss = ops.LinearCrossEntropy(4, 3).half()
    x, target, scale = torch.full((1, 4), 1.2e-7).half().requires_grad_(), torch.tensor([1]), 2.0**15
    (fusible.Sequential(loss)(x, target) * scale).backward()
    weight = loss.weight.detach().double().requires_grad_()
    (F.cross_entropy(x.double() @ weight.t(), target) * scale).backward()
    torch.testing.assert_close(loss.weight.grad.double(), weight.grad, rtol=2e-3, atol=0)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["CrossEntropy", "LinearCrossEntropy", "joined"])
@pytest.mark.quick
def test_targets_out_of_range(kind):
    chain = {
        "CrossEntropy": [ops.CrossEntropy()],
        "LinearCrossEntropy": [ops.LinearCrossEntropy(7, 7)],
        "joined": [ops.Linear(7, 7), ops.CrossEntropy()],
    }[kind]
    block = fusible.Sequential(*chain)
    x = torch.randn(2, 3, 7, requires_grad=True)
    name = "CrossEntropy" if kind == "joined" else kind
    for wrong in (7, -1):
        target = torch.zeros(2, 3, dtype=torch.int64)
        target[0, 1], target[1, 2] = -100, wrong
        text = (
            f"{name}: each target must be a class, from 0 to 6, or ignore_index=-100, but the one at [1, 2] is "
            f"{wrong}; the vocabulary has 7 classes"
        )
        with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
            block(x, target)
        assert block(x, target.clamp(0, 6)).requires_grad


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (torch.zeros(3, dtype=torch.int32),
         "must be class indices of torch.int64, got torch.int32; convert them first"),
        (torch.zeros(3), "must be class indices of torch.int64, got torch.float32; convert them first"),
        (torch.zeros(3, 7), "must be class indices of torch.int64, got torch.float32; convert them first"),
        (torch.zeros(4, dtype=torch.int64),
         "must have x's shape without its last dimension, [3], but have [4]; reshape them"),
        (torch.zeros(3, 1, dtype=torch.int64),
         "must have x's shape without its last dimension, [3], but have [3, 1]; reshape them"),
    ],
)  # fmt: skip
@pytest.mark.quick
def test_targets_that_are_none(target, text):
    for op in (ops.CrossEntropy(), ops.LinearCrossEntropy(7, 7)):
        with pytest.raises(ValueError, match=re.escape(f"{type(op).__name__} (op 0): the targets {text}") + "$"):
            fusible.Sequential(op)(torch.randn(3, 7), target)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reduction": "batch"}, "reduction must be 'none', 'mean' or 'sum', got 'batch'"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, got 1.5"),
        ({"soft_cap": 0.0}, "soft_cap must be positive, got 0.0; None caps nothing"),
        ({"class_weight": torch.ones(2, 3)}, "class_weight must have one dimension, got shape [2, 3]"),
    ],
)
@pytest.mark.quick
def test_options_that_cannot_be(options, text):
    for kind, args in ((ops.CrossEntropy, ()), (ops.LinearCrossEntropy, (5, 7))):
        with pytest.raises(ValueError, match="^" + re.escape(f"{kind.__name__}: {text}") + "$"):
            kind(*args, **options)


@pytest.mark.quick
def test_class_weights_must_fit():
    block = fusible.Sequential(ops.CrossEntropy(class_weight=torch.ones(6)))
    text = "CrossEntropy (op 0): class_weight has 6 elements but there are 7 classes (x: [3, 7])"
    with pytest.raises(ValueError, match=re.escape(text)):
        block(torch.randn(3, 7), torch.zeros(3, dtype=torch.int64))


@pytest.mark.quick
def test_an_option_changed_between_the_passes_raises():
    block = fusible.Sequential(ops.Linear(5, 7), ops.CrossEntropy())
    y = block(torch.randn(3, 5), torch.zeros(3, dtype=torch.int64))
    block[1].z_loss = 0.5
    with pytest.raises(RuntimeError, match=r"z_loss was 0.0 in forward and is 0.5 now"):
        y.backward()


@pytest.mark.quick
def test_repr_shows_what_was_chosen():
    assert repr(ops.CrossEntropy("sum", z_loss=0.1)) == "CrossEntropy(reduction='sum', z_loss=0.1)"
    text = "LinearCrossEntropy(in_features=5, num_classes=7, bias=True, soft_cap=30.0)"
    assert repr(ops.LinearCrossEntropy(5, 7, True, soft_cap=30.0)) == text
    assert Counter(dict(ops.LinearCrossEntropy(5, 7).state_dict()).keys()) == Counter(["weight"])
