"""Inputs that are no floating stream: integers, lengths that are no part of a plan's key, extra inputs of their own
shape, extra inputs that options do without; and results without a dimension."""

from __future__ import annotations

import pytest
import torch

import fusible
from fusible import Grads, Op, Out, Saved, Spec, ops, reads_for
from fusible.op import Absent
from fusible.testing import check, check_op

pytestmark = pytest.mark.quick


class Look(Op):
    """Rows of a table: tokens [...] -> [..., n]."""

    lengthwise = ("x",)

    def __init__(self, num, width):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(num, width))

    def reference(self, x, table):
        return table[x]

    def infer(self, x, *, autocast=None):
        if x.dtype is not torch.int64:
            raise ValueError(f"x must be int64, got {x.dtype}")
        return Spec((*x.shape, self.table.shape[1]), self.table.dtype, x.device)


class Pick(Op):
    """`y = x + table[at] (+ shift)`; `at` [T] are integers, `shift` one number per row, if there is one."""

    num_extra_inputs = 2
    lengthwise = ("at",)

    class Saved(Saved):
        at: torch.Tensor = reads_for("table")

    def __init__(self, width, shift=Absent):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(5, width))
        self.shift = shift

    def extra_input_names(self):
        return ("at", self.shift)

    def reference(self, x, at, shift, table):
        y = x + table[at]
        return y if shift is None else y + shift

    def fwd(self, x, at, shift, table):
        return Out(self.reference(x, at, shift, table), saved=Pick.Saved(at))

    def bwd(self, saved, dy, table=reads_for(), *, env):
        dtable = None
        if env.needs.table:
            rows = dy.flatten(0, -3).sum(0) if dy.dim() > 2 else dy
            dtable = dy.new_zeros(5, dy.shape[-1]).index_add_(0, saved.at, rows)
        return Grads(dy, None, dy.sum(-1, keepdim=True) if env.needs.shift else None, table=dtable)

    def infer(self, x, at, shift, *, autocast=None):
        if at.shape != (x.shape[-2],):
            raise ValueError(f"at must have shape [{x.shape[-2]}] but has {list(at.shape)}")
        return x


class Total(Op):
    """`y = sum x t`, a scalar; the targets t are an extra input."""

    num_extra_inputs = 1
    lengthwise = ("t",)

    class Saved(Saved):
        t: torch.Tensor = reads_for("x")
        width: int = reads_for("x")

    def reference(self, x, t):
        return (x * t.unsqueeze(-1)).sum()

    def fwd(self, x, t):
        return Out(self.reference(x, t), saved=Total.Saved(t, x.shape[-1]))

    def bwd(self, saved, dy):
        t, width = saved
        return Grads((dy * t).to(dy.dtype).unsqueeze(-1).expand(*t.shape, width).contiguous(), None)

    def infer(self, x, t, *, autocast=None):
        return x._replace(shape=())


def test_twenty_lengths_one_plan():
    """Neither the length of tokens, nor that of indices and targets, is part of a plan's key."""
    block = fusible.Sequential(Look(7, 6), Pick(6), ops.RMSNorm(6), Total(), inputs=("at",))
    for length in range(1, 21):
        tokens, at = torch.arange(2 * length).view(2, length) % 7, torch.arange(length) % 5
        block(tokens, torch.ones(2, length, dtype=torch.int64), at=at).backward()
        fuser, _ = block.single_chain(tokens, torch.ones(2, length, dtype=torch.int64), at=at)
    assert len(fuser.plans) == 1
    assert fuser.chain.lengths == {0, *fuser.chain.inputs}


def test_width_stays_part_of_the_key_where_an_op_reads_it():
    class Both(Pick):
        def extra_input_names(self):
            return ("at", "at")

        def infer(self, x, at, shift, *, autocast=None):
            return x

        reference = lambda self, x, at, shift, table: x + shift.sum()  # noqa: E731

    block = fusible.Sequential(Both(6), inputs=("at",))
    fuser, _ = block.single_chain(torch.ones(3, 6), at=torch.ones(3))
    assert fuser.chain.lengths == set()


def test_the_width_behind_an_op_with_a_fixed_size_is_known():
    """An op that takes no shape with every size doubled, since one of them is fixed, hides no width."""

    class Heads(Op):
        num_extra_inputs = 1
        lengthwise = ("mask",)

        def reference(self, x, mask):
            return x * mask.sum()

        def infer(self, x, mask, *, autocast=None):
            if mask.shape != (3, x.shape[-2]):
                raise ValueError("mask must be [3, T]")
            return x

    block = fusible.Sequential(Heads(), ops.Linear(6, 6), ops.ReLU())
    x, mask = torch.randn(2, 5, 6, requires_grad=True), torch.ones(3, 5)
    fuser, values = block.single_chain(x, mask)
    executable, _, _ = fuser.find(values, block.rules)
    assert [step.env.width for step in executable.plan.forward_steps] == [6, 6]
    assert executable.plan.varying == {1}


def test_behind_an_op_whose_width_depends_on_the_rows_it_is_unknown():
    block = fusible.Sequential(ops.Reshape((4, -1)), ops.ReLU())
    fuser, values = block.single_chain(torch.randn(2, 4, 6, requires_grad=True))
    executable, _, _ = fuser.find(values, block.rules)
    assert [step.env.width for step in executable.plan.forward_steps] == [6, None]


def test_integers_in():
    check(fusible.Sequential(Look(7, 6), ops.GELU()).double(), torch.tensor([[1, 2, 6], [0, 2, 2]]), gradcheck=True)
    with pytest.raises(ValueError, match=r"Look \(op 0\): x must be int64, got torch.float32"):
        fusible.Sequential(Look(7, 6))(torch.ones(3))
    with pytest.raises(ValueError, match=r"AddExtraInput \(op 0\): its extra input must have a floating dtype"):
        fusible.Sequential(ops.AddExtraInput())(torch.ones(3), torch.ones(3, dtype=torch.int64))


def test_extra_inputs_of_their_own_shape_present_and_absent():
    x, at, shift = torch.randn(2, 3, 6).double(), torch.tensor([4, 0, 2]), torch.randn(2, 3, 1).double()
    check_op(Pick(6).double(), x, at)
    check_op(Pick(6, "shift").double(), x, at, shift)
    check(fusible.Sequential(Pick(6, None), inputs=("at",)).double(), x, shift, at=at)
    with pytest.raises(ValueError, match=r"Pick \(op 0\): at must have shape \[3\] but has \[2\]"):
        fusible.Sequential(Pick(6), inputs=("at",)).double()(x, at=at[:2])


def test_absent_inputs_called_alone():
    x, at = torch.randn(3, 6), torch.tensor([4, 0, 2])
    op = Pick(6)
    assert torch.equal(op(x, at), x + op.table[at])
    with pytest.raises(TypeError, match="Pick takes x and 1 extra inputs, got 2"):
        op(x, at, at)
    assert op.present_inputs() == ("at",)


def test_a_scalar_out():
    x, t = torch.randn(3, 6).double(), torch.tensor([1, 0, 2])
    check_op(Total(), x, t)
    block = fusible.Sequential(ops.Linear(6, 4), ops.Residual(ops.Tanh()), Total(), ops.MakeExtraOutput()).double()
    check(block, x, t, gradcheck=True)
    assert block(x, t)[0].shape == ()
    assert "Total" in str(block.explain(x.requires_grad_(), t))
    with pytest.raises(ValueError, match="x must have at least one dimension, got a scalar"):
        fusible.Sequential(Total(), ops.ReLU()).double()(x, t)
