"""Every row of `rows.py` against its formula, its `torch.nn` twin, finite differences, and whatever it may be given."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
import re

import pytest
import torch
from rows import FLOATS, ROWS, Row
from torch.testing import assert_close

import fusible
from fusible import kernels, ops
from fusible.testing import check, check_op

LEADING = [(), (1,), (7,), (2, 3), (2, 1, 3), (2, 1, 2, 2), (0,), (2, 0), (0, 3)]
MIXED = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
]

rows = pytest.mark.parametrize("row", ROWS, ids=str)
rows_with_parameters = pytest.mark.parametrize("row", [r for r in ROWS if list(r.op().parameters())], ids=str)
rows_with_a_twin = pytest.mark.parametrize("row", [r for r in ROWS if r.twin], ids=str)


def ran(block, inputs, named, seed=3):
    """Outputs, and gradients of every input and parameter."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in (*inputs, *named.values())]
    copies = [t.clone() for t in leaves]  # a twin may write over its input
    torch.manual_seed(seed)
    outs = block(*copies[: len(inputs)], **dict(zip(named, copies[len(inputs) :], strict=True)))
    outs = outs if isinstance(outs, tuple) else (outs,)
    parameters = list(block.parameters())
    wanted = [t for t in (*leaves, *parameters) if t.requires_grad]
    grads = torch.autograd.grad([(out * out).sum() + out.sum() for out in outs], wanted)
    return [*outs, *grads]


@pytest.mark.quick
def test_every_op_has_a_row_and_every_row_a_truth():
    exported = {getattr(ops, name) for name in ops.__all__ if name != "TWINS"}
    assert exported == {row.kind for row in ROWS}
    assert [str(row) for row in ROWS if not (row.twin or row.formula)] == []
    assert len({str(row) for row in ROWS}) == len(ROWS)
    for kind in exported - {ops.Residual}:
        module = inspect.getmodule(kind).__name__
        assert module.startswith("fusible.ops."), f"{kind.__name__} lives in {module}"


@rows
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_against_its_reference(row, dtype):
    exact = dtype is torch.float64
    inputs, named = row.named(row.inputs(dtype))
    check(row.block(dtype), *inputs, frozen=exact, gradcheck=exact, **named)


@rows
def test_alone_and_unfused(row):
    if issubclass(row.kind, fusible.Op):
        check_op(row.op(torch.float32), *row.inputs(torch.float32), gradcheck=False)


@rows
@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_any_rank_and_no_rows(row, leading):
    inputs, named = row.named(row.inputs(leading=leading))
    if row.own + len(leading) <= 5:
        check(row.block(), *inputs, layouts=False, frozen=False, **named)


@rows_with_parameters
@pytest.mark.parametrize(("x", "parameters"), MIXED, ids=str)
def test_parameters_of_another_dtype(row, x, parameters):
    block, (inputs, named) = row.block(parameters), row.named(row.inputs(x))
    check(block, *inputs, layouts=False, **named)
    linear = isinstance(block[0], (ops.Linear, ops.BasicLinear, ops.PairLinear)) or not inputs[0].is_floating_point()
    residual = isinstance(block[0], ops.Residual)
    right = torch.promote_types(x, parameters) if residual else parameters if linear else x
    if isinstance(block[0], ops.LinearCrossEntropy):
        right = torch.promote_types(parameters, torch.float32)
    assert block(*inputs, **named).dtype is right


@rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_under_autocast(row, dtype):
    inputs, named = row.named(row.inputs(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        check(row.block(dtype), *inputs, layouts=False, frozen=False, **named)


@rows
@pytest.mark.quick
def test_against_its_formula_or_twin(row):
    inputs, named = row.named(row.inputs())
    block = row.block()
    if row.twin:
        truth = row.construct(row.twin).double()
        truth.load_state_dict(block[0].state_dict())
    else:
        truth = _Formula(row, block[0])
    backend = kernels.use("reference") if row.kind is ops.Dropout else contextlib.nullcontext()  # with its twin's masks
    with backend:
        mine, theirs = ran(block, inputs, named), ran(truth, [*inputs, *named.values()], {})
    for a, b in zip(mine, theirs, strict=True):
        assert_close(a, b, rtol=1e-10, atol=1e-10)


class _Formula(torch.nn.Module):
    def __init__(self, row, op):
        super().__init__()
        self.row, self.op = row, op

    def forward(self, *tensors):
        return self.row.formula(self.op, *tensors)


@rows_with_a_twin
@pytest.mark.quick
def test_is_its_twin(row):
    """Same constructor, same first parameters, same keys, and loads of the one go into the other."""
    torch.manual_seed(4)
    op = row.construct(row.kind)
    torch.manual_seed(4)
    twin = row.construct(row.twin)
    assert isinstance(op, row.twin)
    assert list(op.state_dict()) == list(twin.state_dict())
    assert all(torch.equal(op.state_dict()[key], value) for key, value in twin.state_dict().items())
    op.load_state_dict(twin.state_dict())
    twin.load_state_dict(op.state_dict())
    assert repr(op).startswith(repr(twin).removesuffix(")"))


@pytest.mark.parametrize("twin", ops.TWINS, ids=lambda twin: twin.__name__)
@pytest.mark.quick
def test_takes_every_argument_of_its_twin(twin):
    wanted = inspect.signature(twin.__init__).parameters.values()
    given = inspect.signature(ops.TWINS[twin].__init__).parameters
    passes_on = any(p.kind is p.VAR_POSITIONAL for p in given.values())
    assert all(p.name in given and given[p.name].default == p.default for p in wanted) or passes_on


@rows
@pytest.mark.quick
def test_copies_and_stores(row):
    """A deep copy, a pickle and a loaded state give the same values, and share nothing with the original."""
    inputs, named = row.named(row.inputs())
    block = row.block()
    truth = ran(block, inputs, named)
    loaded = fusible.Sequential(row.construct(row.kind).double(), inputs=block.inputs)
    file = io.BytesIO()
    torch.save(block.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), loaded):
        for a, b in zip(ran(other, inputs, named), truth, strict=True):
            assert torch.equal(a, b)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
    assert all(parameter.abs().sum() > 0 for parameter in block.parameters())


@rows_with_parameters
@pytest.mark.quick
def test_device_dtype_and_reset_parameters(row):
    if row.kind is ops.Residual:
        return
    meta = row.kind(*row.args, **row.options, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in meta.parameters()} == {("meta", torch.bfloat16)}
    torch.manual_seed(5)
    fresh = row.construct(row.kind)
    op = row.op(torch.float32)
    torch.manual_seed(5)
    op.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(op.parameters(), fresh.parameters(), strict=True))


@rows
@pytest.mark.quick
def test_refuses_what_does_not_fit(row):
    block = row.block(torch.float32)
    positional, named = row.named(row.inputs(torch.float32))
    name = f"{row.kind.__name__} (op 0): "
    for shape, text in row.errors.items():
        with pytest.raises(ValueError, match=re.escape(name + text) + "$"):
            block(torch.ones(shape, dtype=positional[0].dtype), *positional[1:], **named)
    with pytest.raises(ValueError, match="x must have at least one dimension, got a scalar"):
        block(torch.tensor(1.0), *positional[1:], **named)
    if row.kind is ops.Residual:
        return
    for dtype, text in row.refuses:
        if row.any_dtype:
            check(block, *[t.to(torch.int64) for t in row.inputs()], layouts=False, frozen=False)
            continue
        with pytest.raises(ValueError, match=re.escape(f"{name}x {text}")):
            block(torch.ones(row.x, dtype=dtype), *positional[1:], **named)


POINTWISE = [r for r in ROWS if not (list(r.op().parameters()) or r.given or r.own > 1)
             and r.kind not in (ops.Residual, ops.L2Normalization)]  # fmt: skip


@pytest.mark.parametrize("row", POINTWISE, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_extreme_values(row, dtype):
    """Zeros, tiny and huge numbers and NaN, against `reference`."""
    values = torch.tensor([0.0, -0.0, 1e-7, -1e-7, 20.0, -20.0, 6e4, -6e4, torch.nan])
    grid = torch.cartesian_prod(values, values, values[:2]).repeat(1, 4)[:, : row.x[-1]]
    inputs, named = row.named([grid.to(dtype)] * (1 + row.num_extras))
    check(row.block(dtype), *inputs, layouts=False, frozen=False, **named)


NUMBERS = torch.tensor([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0], dtype=torch.float64)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("op", "right"),
    [
        (ops.ReLU(), [0, 0, 0, 0, 1, 1]),
        (ops.SReLU(), [0, 0, 0, 0, 2, 4]),
        (ops.ClampedSwiGLU(limit=1.0), [0.0, 1, 1, 1, 1, 0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_gradients_at_the_kinks(op, right):
    """No row: a comparison within a tolerance cannot tell which side of a kink an equality falls."""
    x = NUMBERS.clone().requires_grad_()
    if isinstance(op, ops.ClampedSwiGLU):  # a gate of sigmoid(1.702), divided out: what is left shows the clamp of b
        y = fusible.Sequential(op)(torch.stack([torch.ones_like(x), x], -1)) / torch.sigmoid(torch.tensor(1.702))
    else:
        y = fusible.Sequential(op)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert_close(dx, torch.tensor(right, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.quick
def test_clamped_gate_passes_at_equality():
    """No row: see above; the gate is clamped on one side only."""
    a = NUMBERS.clone().requires_grad_()
    y = fusible.Sequential(ops.ClampedSwiGLU(limit=1.0))(torch.stack([a, torch.ones_like(a)], -1))
    (da,) = torch.autograd.grad(y.sum(), a)
    assert (da != 0).tolist() == [True, True, True, True, True, False]


@pytest.mark.quick
def test_dropout_follows_p_training_and_the_seed():
    """No row: what is random is compared with itself."""
    block = fusible.Sequential(ops.Dropout(0.5))
    x = torch.ones(4000, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(6)
    y = block(x)
    assert set(y.tolist()) == {0.0, 2.0}
    assert 1800 < int((y == 0).sum()) < 2200
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert not torch.equal(block(x), y)
    torch.manual_seed(6)
    assert torch.equal(block(x), y)
    block[0].p = 0.0
    assert torch.equal(block(x), x)
    block[0].p = 1.0
    assert torch.equal(block(x), torch.zeros_like(x))
    block[0].p = 0.5
    block.eval()
    assert torch.equal(block(x), x)


@pytest.mark.quick
@pytest.mark.parametrize("norm", [ops.RMSNorm(64), ops.LayerNorm(64)], ids=lambda op: type(op).__name__)
def test_norms_of_half_precision_do_not_overflow(norm):
    """No row: random numbers do not overflow; 300² does in float16."""
    x = (300 + torch.randn(4, 64)).half().requires_grad_()
    y = fusible.Sequential(norm.half())(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


def test_a_row_is_enough():
    """No row: this is about rows. An op that a user writes passes the whole suite by its row alone."""

    class Scale(fusible.Op):
        def __init__(self, size, device=None, dtype=None):
            super().__init__()
            self.g = torch.nn.Parameter(torch.empty(size, device=device, dtype=dtype))
            self.reset_parameters()

        def reset_parameters(self):
            torch.nn.init.ones_(self.g)

        def reference(self, x, g):
            return x * g.to(x.dtype)

    row = Row(Scale, 6, formula=lambda op, x: x * op.g)
    for dtype in FLOATS:
        test_against_its_reference(row, dtype)
    test_alone_and_unfused(row)
    test_against_its_formula_or_twin(row)
    test_device_dtype_and_reset_parameters(row)
    for leading in LEADING:
        test_any_rank_and_no_rows(row, leading)
    for x, parameters in MIXED:
        test_parameters_of_another_dtype(row, x, parameters)
