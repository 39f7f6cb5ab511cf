"""Bad input, each error by its text: subject, what must hold, what came, what to do. Shapes of ops are in `rows.py`."""

from __future__ import annotations

import pytest
import torch

import fusible
from fusible import Sequential, kernels, ops
from fusible.ops import AddExtraInput, Linear, MakeExtraOutput, Residual

X = torch.ones(3, 6)
META = torch.ones(3, 6, device="meta")

#: (what is built, error, text)
BUILT = [
    (lambda: Sequential(ops.GELU), TypeError,
     "op 0 must be an op or a torch.nn module, got the class GELU; write GELU(...)"),
    (lambda: Sequential(ops.GELU(), 3), TypeError, "op 1 must be an op or a torch.nn module, got 3 (int)"),
    (lambda: Sequential(ops.GELU(), None), TypeError, "op 1 must be an op or a torch.nn module, got None (NoneType)"),
    (lambda: Sequential(torch.relu), TypeError,
     f"op 0 must be an op or a torch.nn module, got {torch.relu!r} (builtin_function_or_method)"),
    (lambda: Sequential(AddExtraInput("a")), ValueError,
     "AddExtraInput (op 0): reads 'a', which no op makes; make it earlier with MakeExtraOutput('a'), or pass it to the "
     "block with Sequential(..., inputs=('a',))"),
    (lambda: Sequential(AddExtraInput("a"), ops.GELU(), MakeExtraOutput("a")), ValueError,
     "AddExtraInput (op 0): reads 'a' before MakeExtraOutput (op 2) makes it; an op can only read what was made "
     "earlier"),
    (lambda: Sequential(MakeExtraOutput("a"), Residual(MakeExtraOutput("a")), AddExtraInput("a")), ValueError,
     "MakeExtraOutput (op 1.0): makes 'a', which MakeExtraOutput (op 0) has made; names are unique"),
    (lambda: Sequential(MakeExtraOutput("a"), AddExtraInput("a"), inputs=("a",)), ValueError,
     "MakeExtraOutput (op 0): makes 'a', which is an input of the block; names are unique"),
    (lambda: Sequential(ops.GELU(), inputs=("a", "b")), ValueError,
     "inputs=('a', 'b'): no op reads 'a'; take it out or name it in an op"),
    (lambda: Sequential(AddExtraInput("a"), inputs=("a", "a")), ValueError, "inputs=('a', 'a'): 'a' is named twice"),
    (lambda: ops.Dropout(1.5), ValueError, "dropout probability has to be between 0 and 1, but got 1.5"),
    (lambda: ops.GEGLU("tan"), ValueError, "approximate must be 'none' or 'tanh', got 'tan'"),
    (lambda: ops.SwiGLU(interleave=0), ValueError,
     "interleave must be a positive number of elements or None, got 0"),
    (lambda: ops.ClampedSwiGLU(limit=-1.0), ValueError, "limit must be at least 0, got -1.0"),
    (lambda: ops.SiTUGLU(beta1=0.0), ValueError, "beta1 and beta2 must be positive, got 0.0 and 25.0"),
    (lambda: ops.Reshape((2, -1, -1)), ValueError,
     "shape must be sizes of at least one dimension, one of them perhaps -1, got (2, -1, -1)"),
    (lambda: ops.Reshape(()), ValueError,
     "shape must be sizes of at least one dimension, one of them perhaps -1, got ()"),
    (lambda: Sequential(ops.GELU()) * 0, ValueError, "Sequential * 0: the count must be positive"),
    (lambda: kernels.use("cuda").__enter__(), ValueError,
     "kernels.use('cuda'): the backend must be one of reference, cpu, triton"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("make", "error", "text"), BUILT, ids=lambda v: v[:50] if isinstance(v, str) else "")
def test_built(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == text


class Pair(torch.nn.Module):
    def forward(self, x):
        return 1, 2


class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean()


def extras() -> Sequential:
    return Sequential(AddExtraInput(), ops.Tanh(), AddExtraInput())


def shared() -> Sequential:
    return Sequential(AddExtraInput("a"), inputs=("a",))


#: (block, call, error, text)
CALLED = [
    (extras, lambda b: b(X), TypeError,
     "Sequential takes 2 extra inputs (AddExtraInput (op 0), AddExtraInput (op 2)), got 0; call it as "
     "block(x, extra0, extra1)"),
    (extras, lambda b: b(X, X, X, X), TypeError,
     "Sequential takes 2 extra inputs (AddExtraInput (op 0), AddExtraInput (op 2)), got 3; call it as "
     "block(x, extra0, extra1)"),
    (lambda: Sequential(ops.GELU()), lambda b: b(X, X), TypeError,
     "Sequential takes 0 extra inputs, got 1; call it as block(x)"),
    (extras, lambda b: b(X, X, 3.0), TypeError, "Sequential: extra inputs must be tensors, got 3.0 (float)"),
    (extras, lambda b: b(X, None, X), TypeError, "Sequential: extra inputs must be tensors, got None (NoneType)"),
    (shared, lambda b: b(X), TypeError, "Sequential needs its input 'a'; pass block(x, a=...)"),
    (shared, lambda b: b(X, b=X), TypeError, "Sequential takes no input 'b'; it has a, declared by inputs="),
    (extras, lambda b: b(X, X, X, b=X), TypeError,
     "Sequential takes no input 'b'; it has none, declared by inputs="),
    (shared, lambda b: b(X, a=[1.0]), TypeError, "Sequential: extra inputs must be tensors, got [1.0] (list)"),
    (extras, lambda b: b([1.0], X, X), TypeError, "Sequential: x must be a tensor, got [1.0] (list)"),
    (extras, lambda b: b(None, X, X), TypeError, "Sequential: x must be a tensor, got None (NoneType)"),
    (lambda: Sequential(), lambda b: b(3), TypeError, "Sequential: x must be a tensor, got 3 (int)"),
    (lambda: Sequential(ops.GELU()), lambda b: b(torch.tensor(2.0)), ValueError,
     "Sequential: x must have at least one dimension, got a scalar"),
    (extras, lambda b: b(X, X[:1], X), ValueError,
     "AddExtraInput (op 0): its extra input must have x's shape [3, 6] but has [1, 6]; expand it first"),
    (extras, lambda b: b(X, X, X[0]), ValueError,
     "AddExtraInput (op 2): its extra input must have x's shape [3, 6] but has [6]; expand it first"),
    (extras, lambda b: b(X, torch.tensor(1.0), X), ValueError,
     "Sequential: extra inputs must have at least one dimension, got a scalar"),
    (shared, lambda b: b(X, a=torch.tensor(1.0)), ValueError,
     "Sequential: extra inputs must have at least one dimension, got a scalar"),
    (lambda: Sequential(Pair(), ops.GELU()), lambda b: b(X), TypeError,
     "Pair (op 0) must return a tensor of at least one dimension for what follows it, got (1, 2) (tuple)"),
    (lambda: Sequential(Mean(), ops.GELU()), lambda b: b(X), TypeError,
     "Mean (op 0) must return a tensor of at least one dimension for what follows it, got a scalar"),
    (extras, lambda b: b(X, X.int(), X), ValueError,
     "AddExtraInput (op 0): its extra input must have a floating dtype, got torch.int32; convert it first, with "
     "float()"),
    (extras, lambda b: b(X, X, META), ValueError,
     "AddExtraInput (op 2): its extra input is on meta but x is on cpu; move one of them"),
    (lambda: Sequential(Linear(6, 6)), lambda b: b(META), ValueError,
     "Linear (op 0): weight is on cpu but x is on meta; move the block or the input"),
    (lambda: Sequential(ops.GELU(), ops.RMSNorm(6, device="meta")), lambda b: b(X), ValueError,
     "RMSNorm (op 1): weight is on meta but x is on cpu; move the block or the input"),
    (lambda: Sequential(Linear(6, 63), ops.GELU(), ops.RMSNorm(64)), lambda b: b(torch.ones(8, 6)), ValueError,
     "RMSNorm (op 2): weight has 64 elements but x's last dimension is 63 (x: [8, 63])"),
    (lambda: Sequential(Linear(6, 5), ops.GLU()), lambda b: b(X), ValueError,
     "GLU (op 1): x's last dimension must be even, two halves, but is 5 (x: [3, 5])"),
    (lambda: Sequential(ops.Tanh(), Sequential(Residual(Linear(5, 5)))), lambda b: b(X), ValueError,
     "Linear (op 1.0.0): weight takes 5 features but x's last dimension is 6 (x: [3, 6])"),
    (lambda: Sequential(Residual(Linear(6, 5))), lambda b: b(X), ValueError,
     "Residual (op 0): f(x) must have x's shape [3, 6] but has [3, 5]"),
    (lambda: Residual(Linear(6, 5)), lambda b: b(X), ValueError,
     "Residual: f(x) must have x's shape [3, 6] but has [3, 5]"),
    (lambda: Residual(AddExtraInput()), lambda b: b(X), TypeError,
     "Residual: AddExtraInput has extra inputs or outputs, which only a fusible.Sequential can route; put the Residual "
     "into one"),
    (lambda: Sequential(ops.Reshape((4, 5))), lambda b: b(X), ValueError,
     "Reshape (op 0): shape [4, 5] holds 20 elements but x has 18 (x: [3, 6])"),
    (lambda: Sequential(torch.nn.Softplus()), lambda b: b.explain(), ValueError,
     "Sequential.explain() cannot tell the width of x from the ops; give it x, as in explain(x)"),
    (lambda: Sequential(torch.nn.Softplus()), lambda b: b.single_chain(X), ValueError,
     "Sequential is more than one chain; print(block.explain(x)) shows what splits it"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize(("make", "call", "error", "text"), CALLED, ids=lambda v: v[:50] if isinstance(v, str) else "")
def test_called(make, call, error, text, grad):
    block = make()
    with torch.set_grad_enabled(grad), pytest.raises(error) as caught:
        call(block)
    assert str(caught.value) == text
    assert torch.equal(X, torch.ones(3, 6))


@pytest.mark.quick
def test_a_shape_that_does_not_fit_raises_with_a_plan_too():
    """No row: a plan that was made for another shape."""
    block = Sequential(AddExtraInput(), ops.Reshape((-1, 9)))
    block(X, X)
    with pytest.raises(ValueError, match=r"its extra input must have x's shape \[2, 6\] but has \[3, 6\]"):
        block(X[:2], X)
    with pytest.raises(ValueError, match=r"shape \[-1, 9\] holds multiples of 9 elements but x has 6"):
        block(X[:1], X[:1])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda b: b.pop(0), "reads 'a', which no op makes"),
        (lambda b: b.insert(0, AddExtraInput("a")), "reads 'a' before MakeExtraOutput"),
        (lambda b: b.append(MakeExtraOutput("a")), "makes 'a', which MakeExtraOutput"),
        (lambda b: b.append(AddExtraInput("b")), "reads 'b', which no op makes"),
        (lambda b: b[1].append(AddExtraInput("b")), r"AddExtraInput \(op 1.1\): reads 'b', which no op makes"),
        (lambda b: b.__setitem__(0, ops.GELU()), "reads 'a', which no op makes"),
    ],
    ids=["pop", "insert", "append a maker", "append a reader", "inside", "setitem"],
)
def test_a_container_changed_into_a_broken_one_raises_at_the_next_call(change, text):
    block = Sequential(MakeExtraOutput("a"), Residual(ops.Tanh()), AddExtraInput("a"))
    block(X)
    change(block)
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            block(X)


@pytest.mark.quick
def test_an_error_leaves_nothing_behind():
    """No row: the call after it."""
    block = Sequential(Linear(6, 6), ops.GELU())
    truth = block(X)
    for bad in (torch.ones(3, 5), X.int(), META):
        with pytest.raises(ValueError, match="Linear"):
            block(bad)
    assert torch.equal(block(X), truth)


@pytest.mark.quick
def test_a_second_backward_raises_as_torch_does():
    """No row: two backward passes of one graph."""
    x = X.clone().requires_grad_()
    y = Sequential(Linear(6, 6), ops.GELU())(x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match=r"backward through the graph .*a second time"):
        y.backward()


@pytest.mark.quick
def test_explain_strict():
    """No row: everything that did not fuse, in one error."""
    block = Sequential(Linear(6, 6), torch.nn.Softplus(), Linear(6, 6))
    with pytest.raises(RuntimeError) as caught:
        block.explain(X, strict=True)
    text = "Sequential is not fully fused: Softplus (op 1) runs as it is: Softplus is not an op of fusible"
    assert str(caught.value).startswith(text)
    assert fusible.Sequential(Linear(6, 6)).explain(X, strict=True)
