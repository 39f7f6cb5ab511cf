"""The contract of an op: the kinds that users may write, and what they get wrong."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

import fusible
from fusible import Grads, Op, Out, Saved, Spec, ops, reads_for
from fusible.op import Names
from fusible.testing import check, check_op


class Parametrised(Op):
    def __init__(self, *names: str, size: int = 6) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.randn(size)))


# -- ops that hold to it -----------------------------------------------------------------------------------------------


class Scale(Parametrised):
    """The one of the contract's page."""

    def __init__(self) -> None:
        super().__init__("g")

    class Saved(Saved):
        x: Tensor = reads_for("g")

    def reference(self, x, g):
        return x * g

    def fwd(self, x, g):
        return Out(x * g, saved=Scale.Saved(x))

    def bwd(self, saved, dy, g=reads_for("x"), *, env):
        assert (saved.x is not None) == env.needs.g == env.keeps.x
        assert (g is not None) == env.needs.x
        dg = (dy * saved.x).reshape(-1, 6).sum(0) if env.needs.g else None
        return Grads(dy * g if env.needs.x else None, g=dg)


class ReferenceOnly(Parametrised):
    def __init__(self) -> None:
        super().__init__("a", "b")

    def reference(self, x, a, b):
        return (x * a).softmax(-1) + b


class TwoOutputs(Op):
    num_extra_outputs = 2

    def reference(self, x):
        return x.sin(), x * 2, x.cos()


class ThreeInputs(Parametrised):
    """Named and unnamed extra inputs, without kernels of its own."""

    num_extra_inputs = 2

    def __init__(self) -> None:
        super().__init__("g")

    def extra_input_names(self):
        return (None, "shared")

    def reference(self, x, first, second, g):
        return x * first + second * g


class WithKernels(Op):
    """Extra input and extra output with `fwd` and `bwd`, either gradient of which may be absent."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    class Saved(Saved):
        x: Tensor = reads_for("scale")
        scale: Tensor = reads_for("x")

    def reference(self, x, scale):
        return x * scale, x + scale

    def fwd(self, x, scale):
        return Out(x * scale, x + scale, saved=WithKernels.Saved(x, scale))

    def bwd(self, saved, dy, d_sum, *, env):
        dx = ds = None
        if dy is not None:
            dx = dy * saved.scale if env.needs.x else None
            ds = dy * saved.x if env.needs.scale else None
        if d_sum is not None:
            dx = d_sum if dx is None else dx + d_sum
            ds = d_sum if ds is None else ds + d_sum
        return Grads(dx, ds)


class Viewing(Op):
    """Output and gradient are views."""

    class Saved(Saved):
        shape: tuple

    def reference(self, x):
        return x.mT if x.dim() > 1 else x

    def fwd(self, x):
        return Out(self.reference(x), saved=Viewing.Saved(tuple(x.shape)))

    def bwd(self, saved, dy):
        return Grads(dy.mT if len(saved.shape) > 1 else dy)


class Optional(Parametrised):
    """One of its parameters is None."""

    def __init__(self) -> None:
        super().__init__("a")
        self.register_parameter("b", None)

    def reference(self, x, a, b):
        return x * a if b is None else x * a + b


class Unused(Parametrised):
    """One of its parameters has no part in the formula."""

    def __init__(self) -> None:
        super().__init__("a", "b")

    def reference(self, x, a, b):
        return x + a


class OtherOrder(Parametrised):
    """Its parameters are found by name, whatever their order."""

    def __init__(self) -> None:
        super().__init__("b", "a")

    def reference(self, x, a, b):
        return x * a + b


class Integers(Op):
    """An integer extra output, which has no gradient."""

    num_extra_outputs = 1

    def reference(self, x):
        return x.relu(), (x > 0).to(torch.int64)


class Noise(Op):
    """Draws random numbers in its formula."""

    def reference(self, x):
        return x * torch.rand(x.shape[-1], dtype=x.dtype, device=x.device)


KINDS = [
    Scale,
    ReferenceOnly,
    TwoOutputs,
    ThreeInputs,
    WithKernels,
    Viewing,
    Optional,
    Unused,
    OtherOrder,
    Integers,
    Noise,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_ops_of_users(kind, dtype):
    op = kind().to(dtype)
    inputs = [torch.randn(3, 6).to(dtype) for _ in range(1 + op.num_extra_inputs)]
    check_op(op, *inputs, gradcheck=dtype is torch.float64 and kind is not Noise)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_ops_of_users_between_others(kind):
    op = kind()
    names = [name for name in op.extra_input_names() if name]
    block = fusible.Sequential(ops.Linear(6, 6), op, ops.GELU(), ops.Reshape((-1, 3)), inputs=names).double()
    if kind in (ThreeInputs, Viewing):
        block = fusible.Sequential(ops.Tanh(), op, ops.GELU(), inputs=names).double()
    positional = [torch.randn(3, 6).double() for _ in range(1 + op.num_extra_inputs - len(names))]
    check(block, *positional, **{name: torch.randn(3, 6).double() for name in names})


@pytest.mark.quick
def test_double_backward_through_random_numbers_raises():
    """No row: it must raise."""
    block = fusible.Sequential(Noise())
    x = torch.randn(3, 6, requires_grad=True)
    (dx,) = torch.autograd.grad(block(x).sum(), x, retain_graph=True)
    assert dx.isfinite().all()
    with pytest.raises(RuntimeError, match=r"fusible: double backward through .*random numbers"):
        torch.autograd.grad(block(x).sum(), x, create_graph=True)


@pytest.mark.quick
def test_saved():
    """Records are immutable tuples with named fields."""
    record = Scale.Saved(3)
    assert record.x == 3
    assert record == Scale.Saved(x=3)
    assert repr(record) == "Scale.Saved(x=3)"
    assert pickle.loads(pickle.dumps(record)) == record
    assert Saved() == ()
    for make, text in (
        (lambda: Scale.Saved(), "Scale.Saved() missing 1 required positional argument: 'x'"),
        (lambda: Scale.Saved(1, 2), "Scale.Saved() takes 2 positional arguments but 3 were given"),
        (lambda: Scale.Saved(1, y=2), "Scale.Saved() got an unexpected keyword argument 'y'"),
        (lambda: WithKernels.Saved(x=1), "WithKernels.Saved() missing 1 required positional argument: 'scale'"),
        (lambda: Saved(1), "Saved has no fields; annotate them in it, as in x: Tensor"),
    ):
        with pytest.raises(TypeError) as caught:
            make()
        assert str(caught.value) == text
    with pytest.raises(AttributeError):
        record.x = 4


@pytest.mark.quick
def test_names():
    names = Names(frozenset({"x", "linear.weight"}), frozenset({"x", "linear.weight", "linear.bias"}))
    assert names.x
    assert names.linear.weight
    assert not names.linear.bias
    assert "linear.weight" in list(names)
    with pytest.raises(AttributeError, match="no 'y' here; there are linear, x"):
        _ = names.y
    assert not Names(frozenset(), frozenset())


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def op_of(*names: str, extras: int = 0, outputs: int = 0, **methods: object) -> Op:
    """An op called Wrong with these parameters and methods."""
    kind = type("Wrong", (Parametrised,), {"num_extra_inputs": extras, "num_extra_outputs": outputs, **methods})
    return kind(*names)


def x_only(self, x):
    return x


def x_g(self, x, g):
    return x * g


def saved_dy(self, saved, dy):
    return Grads(dy)


BOTH = "write both fwd and bwd, or neither and keep only reference"
SIGNATURES = [
    (op_of("g", reference=x_only), "Wrong.reference(x) lacks its parameter g; write reference(self, x, g)"),
    (op_of("g", "h", reference=x_g), "Wrong.reference(x, g) lacks its parameter h; write reference(self, x, g, h)"),
    (op_of(reference=x_g),
     "Wrong.reference(x, g) asks for g, which the op has not registered; register a parameter g, or set "
     "num_extra_inputs if it is an extra input"),
    (op_of("g", extras=1, reference=x_g),
     "Wrong.reference(x, g) lacks its parameter g; write reference(self, x, g, g)"),
    (op_of(), "Wrong lacks reference(self, x, ...): write its formula in plain torch"),
    (op_of(reference=x_only, fwd=x_only), "Wrong lacks bwd: " + BOTH),
    (op_of(reference=x_only, bwd=saved_dy), "Wrong lacks fwd: " + BOTH),
    (op_of("g", reference=x_g, fwd=x_only, bwd=saved_dy),
     "Wrong.fwd must take (x, g), got (x); write fwd(self, x, g)"),
    (op_of("g", reference=x_g, fwd=x_g, bwd=saved_dy),
     "Wrong.bwd must take (saved, dy, g), got (saved, dy); write bwd(self, saved, dy, g)"),
    (op_of(outputs=1, reference=x_only, fwd=x_only, bwd=saved_dy),
     "Wrong.bwd must take (saved, dy, d_extra_output), got (saved, dy); write bwd(self, saved, dy, d_extra_output)"),
    (op_of(reference=x_only, fwd=lambda self, x, *, needs: x, bwd=saved_dy),
     "Wrong.fwd may take the keyword env alone, got needs"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("op", "text"), SIGNATURES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_signatures_that_do_not_fit_raise_when_the_block_is_built(op, text):
    with pytest.raises(TypeError) as caught:
        fusible.Sequential(ops.GELU(), op)
    assert str(caught.value) == text


def doubled(self, x):
    return x * 2


def fwd_of(result):
    return {"reference": doubled, "fwd": lambda self, x: result(x), "bwd": saved_dy}


def bwd_of(result):
    return {"reference": doubled, "fwd": lambda self, x: Out(x * 2), "bwd": lambda self, saved, dy: result(dy)}


def bwd_g_of(result):
    def fwd(self, x, g):
        return Out(x * g)

    return {"reference": x_g, "fwd": fwd, "bwd": lambda self, saved, dy, g: result(dy, g)}


def keeping(op_saved: object, record: object) -> dict:
    return {"Saved": op_saved, "reference": doubled, "fwd": lambda self, x: Out(x * 2, **record(x)), "bwd": saved_dy}


class KeepsX(Saved):
    x: Tensor


RETURNS = [
    (op_of(**fwd_of(lambda x: x)), "forward must return Out(y, ...), got Tensor"),
    (op_of(**fwd_of(lambda x: Out())), "forward must return y and 0 extra outputs, all tensors, it returned ()"),
    (op_of(**fwd_of(lambda x: Out(x, x))),
     "forward must return y and 0 extra outputs, all tensors, it returned (Tensor, Tensor)"),
    (op_of(**fwd_of(lambda x: Out(x, record=KeepsX(x)))), "returned a record for 'record'; there is only saved"),
    (op_of(**keeping(KeepsX, lambda x: {})), "lacks its record; return Out(..., saved=KeepsX(x))"),
    (op_of(**keeping(KeepsX, lambda x: {"saved": Scale.Saved(x)})), "its record must be KeepsX, got Scale.Saved"),
    (op_of(**fwd_of(lambda x: Out(x.double()))),
     "forward returned torch.float64 with last dimension [6], but reference gives torch.float32 with [6]; one of them"),
    (op_of(**bwd_of(lambda dy: dy)), "backward must return Grads(dx, ...), got Tensor"),
    (op_of(**bwd_of(lambda dy: Grads())),
     "backward must return dx and 0 gradients of extra inputs, it returned 0 gradients"),
    (op_of(**bwd_of(lambda dy: Grads(None))), "returned no gradient for x, though it is wanted"),
    (op_of(**bwd_of(lambda dy: Grads(dy, g=dy))),
     "returned a gradient of Wrong (op 0) for 'g'; there is only no parameter"),
    (op_of("g", **bwd_g_of(lambda dy, g: Grads(dy * g))),
     "returned no gradient for g of Wrong (op 0), though it is wanted"),
    (op_of("g", **bwd_g_of(lambda dy, g: Grads(dy * g, g=dy))),
     "the gradient of g of Wrong (op 0) has shape [3, 6], the parameter [6]"),
    (op_of("g", **bwd_g_of(lambda dy, g: Grads(dy * g, h=dy))),
     "returned a gradient of Wrong (op 0) for 'h'; there is only g"),
    (op_of(outputs=1, reference=x_only),
     "reference must return y and 1 extra outputs, it returned 1 tensors"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("op", "text"), RETURNS, ids=lambda value: value[:50] if isinstance(value, str) else "")
def test_an_op_that_returns_the_wrong_thing(op, text):
    block = fusible.Sequential(op, rules=())
    x = torch.randn(3, 6, requires_grad=True)
    with pytest.raises(TypeError) as caught:
        block(x).sum().backward()
    assert str(caught.value).startswith("Wrong (op 0)")
    assert text in str(caught.value)


@pytest.mark.quick
def test_a_record_must_not_hold_a_parameter():
    """No row: parameters come to `bwd` as arguments, so that autograd watches them."""

    class Holds(Parametrised):
        class Saved(Saved):
            g: Tensor

        def reference(self, x, g):
            return x * g

        def fwd(self, x, g):
            return Out(x * g, saved=Holds.Saved(g))

        def bwd(self, saved, dy, g):
            return Grads(dy * g, g=dy.sum(0))

    text = r"Holds \(op 0\): .*Saved.g holds a parameter; backward gets it as an argument"
    with pytest.raises(TypeError, match=text):
        fusible.Sequential(Holds("g"))(torch.randn(3, 6, requires_grad=True))


@pytest.mark.quick
def test_a_wrong_infer_is_seen():
    """No row: `infer` belongs to the op."""

    class Wrong(Op):
        def reference(self, x):
            return x[..., ::2].contiguous()

        def infer(self, x, *, autocast=None):
            return x

    with pytest.raises(TypeError, match=r"Wrong \(op 0\): .* but infer says"):
        fusible.Sequential(Wrong())(torch.ones(3, 6))
    with pytest.raises(AssertionError, match=r"output 0: infer says \[3, 6\] torch.float32 on cpu, reference gives"):
        check_op(Wrong(), torch.ones(3, 6))


@pytest.mark.quick
def test_an_op_alone_is_its_reference():
    """No row: rows run in blocks."""
    x, extra = torch.randn(3, 6), torch.randn(3, 6)
    assert torch.equal(ops.AddExtraInput()(x, extra), x + extra)
    assert [out is x for out in ops.MakeExtraOutput()(x)] == [True, True]
    scale = Scale()
    assert torch.equal(scale(x), x * scale.g)
    with pytest.raises(NotImplementedError, match="Op must define reference"):
        Op()(x)


@pytest.mark.quick
def test_spec():
    assert Spec((3, 6), torch.float32, torch.device("cpu")).width == 6
