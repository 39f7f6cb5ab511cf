"""`fusible.Sequential` as a `torch.nn.Sequential`: containers, names, keys, what is opened and what runs as it is."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

import fusible
from fusible import Op, Sequential, ops, rules, use_rules
from fusible.testing import check

X = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10))

pytestmark = pytest.mark.quick


def block() -> Sequential:
    return Sequential(ops.Linear(6, 8), ops.GELU(), ops.Linear(8, 6), rules=(rules.linear_bias,)).double()


def parts(of: Sequential, x: torch.Tensor = X) -> list[str]:
    return [part.reason or part.title for part in of.explain(x).parts]


def fused(of: Sequential, x: torch.Tensor = X) -> list[str]:
    return [row.rule for part in of.explain(x).parts for row in part.forward if row.rule]


CHANGES = {
    "append": lambda b: b.append(ops.Tanh()),
    "insert": lambda b: b.insert(1, ops.Tanh()),
    "extend": lambda b: b.extend([ops.Tanh(), ops.Linear(6, 2).double()]),
    "pop": lambda b: b.pop(1),
    "setitem": lambda b: b.__setitem__(1, ops.ReLU()),
    "setitem by slice of names": lambda b: b.__setitem__(-1, nn.Linear(8, 2).double()),
    "delitem": lambda b: b.__delitem__(1),
    "delitem of a slice": lambda b: b.__delitem__(slice(1, 3)),
    "iadd": lambda b: b.__iadd__(nn.Sequential(ops.Tanh())),
    "imul": lambda b: b.__imul__(2),
    "setattr": lambda b: setattr(b, "1", ops.SiLU()),
    "add_module": lambda b: b.add_module("last", ops.SiLU()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_in_place_as_torch_changes_it(name):
    """Same modules, names and keys as the twin; the next call sees them."""
    mine, twin = block(), nn.Sequential(*block())
    mine(X)
    torch.manual_seed(11)
    CHANGES[name](mine)
    torch.manual_seed(11)
    CHANGES[name](twin)
    assert type(mine) is Sequential
    assert [*mine._modules] == [*twin._modules]
    assert list(mine.state_dict()) == list(twin.state_dict())
    twin.load_state_dict(mine.state_dict())
    torch.testing.assert_close(mine(X), twin(X), rtol=1e-12, atol=1e-12)
    assert mine.rules == (rules.linear_bias,)
    check(mine, X, layouts=False, frozen=False)


MADE = {
    "slice": (lambda b: b[1:], ["1", "2"]),
    "step": (lambda b: b[::2], ["0", "2"]),
    "add": (lambda b: b + nn.Sequential(ops.Tanh()), ["0", "1", "2", "3"]),
    "mul": (lambda b: b * 2, ["0", "1", "2", "3", "4", "5"]),
    "rmul": (lambda b: 2 * b, ["0", "1", "2", "3", "4", "5"]),
    "deepcopy": (copy.deepcopy, ["0", "1", "2"]),
    "pickle": (lambda b: pickle.loads(pickle.dumps(b)), ["0", "1", "2"]),
}


@pytest.mark.parametrize("name", MADE)
def test_made_from_another_with_its_rules(name):
    make, names = MADE[name]
    old = block()
    old(X)
    new = make(old)
    assert type(new) is Sequential
    assert [*new._modules] == names
    assert new.rules == old.rules
    x = X if names[0] == "0" else torch.randn(3, 8).double()
    if name == "step":
        new = Sequential(*new[:1], rules=new.rules)
    check(new, x, layouts=False, frozen=False)


def test_torch_refuses_what_it_refuses():
    for bad in (lambda b: b + 3, lambda b: b * 1.5, lambda b: b["a"]):
        with pytest.raises(TypeError):
            bad(block())
    for bad in (lambda b: b[7], lambda b: b.pop(9), lambda b: b.insert(9, ops.GELU())):
        with pytest.raises(IndexError):
            bad(block())


def test_a_slice_declares_the_inputs_that_it_reads():
    """No row of changes: the block has inputs."""
    whole = Sequential(ops.AddExtraInput("a"), ops.Tanh(), ops.AddExtraInput("b"), inputs=("a", "b"))
    assert whole[:2].inputs == ("a",)
    assert whole[1:2].inputs == ()
    assert (whole[:2] + whole[2:]).inputs == ("a", "b")
    assert copy.deepcopy(whole).inputs == ("a", "b")
    x, a, b = torch.randn(3, 2, 6)
    assert torch.equal(whole(x, a=a, b=b), whole[1:](whole[:1](x, a=a), b=b))


def test_names():
    """An OrderedDict gives the names; nested containers give paths; Residual is one."""
    named = Sequential(OrderedDict(up=ops.Linear(6, 8), act=ops.GELU(), down=ops.Linear(8, 6))).double()
    assert list(named.state_dict()) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert named.up.in_features == 6
    assert "up Linear" in str(named.explain(X)) or "up BasicLinear" in str(named.explain(X))
    with pytest.raises(ValueError, match=r"Linear \(op up\): weight takes 6 features"):
        named(X[:, :5])
    nested = Sequential(ops.Residual(ops.Linear(6, 6)), Sequential(ops.Linear(6, 6), nn.Sequential(ops.Linear(6, 6))))
    keys = ["0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias", "1.1.0.weight", "1.1.0.bias"]
    assert list(nested.state_dict()) == keys
    assert len(nested.double().explain(X).parts) == 1


class Subclass(nn.Linear):
    """Not exactly `nn.Linear`."""


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x).relu()


class HoldsAModule(Op):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def reference(self, x):
        return self.inner(x)


def hooked(module: nn.Module, kind: str = "forward_hook") -> nn.Module:
    getattr(module, f"register_{kind}")(lambda *args: None)
    return module


def replaced(module: nn.Module) -> nn.Module:
    forward = module.forward
    module.forward = lambda x: forward(x) * 2
    return module


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    return prune.l1_unstructured(ops.Linear(6, 6), "weight", 0.5)


SPLITS = {
    "another type": (lambda: nn.Softplus(), "Softplus is not an op of fusible"),
    "a subclass": (lambda: Subclass(6, 6), "Subclass is not an op of fusible"),
    "a module with modules": (lambda: Custom(), "Custom is not an op of fusible"),
    "an op with modules": (lambda: HoldsAModule(), "HoldsAModule holds other modules (inner)"),
    "a forward hook": (lambda: hooked(ops.Linear(6, 6)), "has hooks, which must see it run; remove them to fuse it"),
    "a forward pre-hook": (lambda: hooked(ops.Tanh(), "forward_pre_hook"), "has hooks"),
    "a backward hook": (lambda: hooked(ops.Linear(6, 6), "full_backward_hook"), "has hooks"),
    "a hook on a residual": (lambda: hooked(ops.Residual(ops.Linear(6, 6))), "has hooks"),
    "a hook on a container": (lambda: hooked(nn.Sequential(ops.Linear(6, 6))), "has hooks"),
    "a replaced forward": (lambda: replaced(ops.Linear(6, 6)), "forward was replaced on this Linear"),
    "a replaced forward of a twin": (lambda: replaced(nn.Tanh()), "forward was replaced on this Tanh"),
    "a replaced forward of a container": (
        lambda: replaced(nn.Sequential(ops.Linear(6, 6))),
        "forward was replaced on this Sequential",
    ),
    "a replaced forward of a residual": (
        lambda: replaced(ops.Residual(ops.Linear(6, 6))),
        "forward was replaced on this Residual",
    ),
    "rules of its own": (lambda: Sequential(ops.Linear(6, 6), rules=rules.NONE), "with rules of its own"),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(ops.Linear(6, 6)), "arametriz"),
    "weight norm of a twin": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), "arametriz"),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(ops.Linear(6, 6)), "arametriz"),
    "pruning": (pruned, "has hooks"),
    "GLU of another dimension": (lambda: ops.GLU(0), "GLU splits dim 0; only the last, dim=-1, can be fused"),
    "another GLU of torch": (lambda: nn.GLU(0), "GLU splits dim 0; only the last, dim=-1, can be fused"),
}


@pytest.mark.parametrize("name", SPLITS)
def test_what_runs_as_it_is_and_why(name):
    make, reason = SPLITS[name]
    torch.manual_seed(12)
    module = make().double()
    whole = Sequential(ops.Linear(6, 6), ops.Tanh(), module, ops.Linear(6, 6), ops.GELU()).double()
    x = torch.randn(4, 6, dtype=torch.float64)  # GLU(0) halves the four rows
    rows = whole.explain(x).parts
    assert [bool(part.reason) for part in rows[:2]] == [False, True]
    assert reason in rows[1].reason
    if name.startswith(("a hook on a ", "pruning")):  # its hooks would have to run to tell its shapes
        assert rows[2].reason == "not planned: shapes behind the module before it are unknown"
    else:
        assert not rows[2].reason
    if name == "spectral norm":  # each call in training changes its buffers
        module.eval()
    whole.zero_grad()
    for rule_set in (rules.DEFAULT, rules.NONE):
        given = x.clone().requires_grad_()
        with use_rules(rule_set):
            y = whole(given)
        plain = nn.Sequential(*whole)
        again = x.clone().requires_grad_()
        torch.testing.assert_close(y, plain(again), rtol=1e-10, atol=1e-12)
        leaves = [p for p in whole.parameters() if p.requires_grad]
        got = torch.autograd.grad(y.sin().sum(), [given, *leaves])
        right = torch.autograd.grad(plain(again).sin().sum(), [again, *leaves])
        for a, b in zip(got, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


COMES = {
    "parametrization": (
        lambda linear: nn.utils.parametrizations.weight_norm(linear),
        lambda linear: nn.utils.parametrize.remove_parametrizations(linear, "weight"),
    ),
    "hook": (lambda linear: hooked(linear), lambda linear: linear._forward_hooks.clear()),
    "replaced forward": (lambda linear: replaced(linear), lambda linear: linear.__dict__.pop("forward")),
}
CONTAINERS = {"residual": lambda: ops.Residual(ops.Linear(6, 6)), "sequential": lambda: nn.Sequential(ops.Linear(6, 6))}


@pytest.mark.parametrize("name", COMES)
def test_what_comes_and_goes_after_a_call_is_seen(name):
    come, go = COMES[name]
    whole = block()
    whole(X)
    come(whole[0])
    assert len(parts(whole)) == 2
    torch.testing.assert_close(whole(X), nn.Sequential(*whole)(X))
    go(whole[0])
    assert len(parts(whole)) == 1
    torch.testing.assert_close(whole(X), nn.Sequential(*whole)(X))


@pytest.mark.parametrize("name", ["hook", "replaced forward"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_what_comes_and_goes_on_a_container_is_seen(container, name):
    come, go = COMES[name]
    whole = Sequential(CONTAINERS[container](), ops.Tanh()).double()
    whole(X)
    for change in (come, go):
        change(whole[0])
        assert len(parts(whole)) == 1 + (change is come)
        torch.testing.assert_close(whole(X), nn.Sequential(*whole)(X))


def test_nested_blocks_are_opened_or_not():
    """Exact types without rules or hooks of their own join the chain; a block in a block keeps its channels apart."""
    inner = [ops.Linear(6, 6), ops.GELU()]
    assert len(parts(Sequential(Sequential(*inner), nn.Sequential(*inner), ops.Residual(*inner)).double())) == 1
    own = Sequential(Sequential(*inner, rules=rules.NONE), *inner).double()
    assert len(parts(own)) == 2

    class Mine(Sequential):
        pass

    assert len(parts(Sequential(Mine(*inner), *inner).double())) == 2
    check(own, X, layouts=False)


def test_use_rules_reaches_nested_blocks():
    """No row: a nested block with rules of its own follows `use_rules` as well."""
    outer = Sequential(Sequential(ops.Linear(6, 6), ops.ReLU(), rules=rules.NONE), ops.Linear(6, 6)).double()
    with use_rules(rules.DEFAULT):
        assert fused(outer[0]) == ["linear_activation"]
    assert fused(outer[0]) == []


def test_parameters_that_are_replaced_are_seen():
    """No row: the same block before and after, for each way to put another tensor under the same name."""
    whole, other = block(), block()
    whole(X)
    whole.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(whole(X), other(X))
    whole[0].weight = nn.Parameter(torch.zeros(8, 6).double())
    assert torch.equal(whole(X), nn.Sequential(*whole)(X)) or torch.allclose(whole(X), nn.Sequential(*whole)(X))
    whole.register_parameter("unused", nn.Parameter(torch.ones(1)))
    check(block(), X, layouts=False)
    whole[0].bias = None
    check(Sequential(*whole), X, layouts=False)


def test_functional_call():
    """No row: other tensors for one call, also ones that are no parameters and have a history."""
    whole = block()
    truth = whole(X)
    state = {name: (p * 2).requires_grad_() for name, p in whole.named_parameters()}
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    given = {name: tensor * scale for name, tensor in state.items()}
    y = torch.func.functional_call(whole, given, X)
    right = torch.func.functional_call(nn.Sequential(*whole), given, X)
    torch.testing.assert_close(y, right, rtol=1e-12, atol=1e-12)
    (d,) = torch.autograd.grad(y.sum(), scale, retain_graph=True)
    (e,) = torch.autograd.grad(right.sum(), scale)
    torch.testing.assert_close(d, e)
    assert torch.equal(whole(X), truth)


def test_an_empty_block_is_the_identity():
    check(Sequential(), X)
    check(Sequential(Sequential(), ops.Residual()), X)


def test_repr_and_plans_are_not_part_of_a_copy():
    whole = block()
    empty = len(pickle.dumps(whole))
    whole(X)
    assert len(pickle.dumps(whole)) == empty
    assert repr(whole) == repr(nn.Sequential(*whole))


def test_forward_hooks_of_the_block_itself():
    """No row: hooks on the outermost block see what `torch.nn` shows them."""
    whole = block()
    seen = []
    whole.register_forward_hook(lambda module, args, out: seen.append((args[0] is X, out.shape)))
    whole(X)
    assert seen == [(True, (3, 6))]
    assert len(whole.explain(X).parts) == 1


def test_extra_outputs_come_in_chain_order():
    """No row: named, unnamed, kept and internal ones, also out of a Residual and across a split."""
    whole = Sequential(
        ops.MakeExtraOutput(),
        ops.Residual(ops.MakeExtraOutput("kept", keep=True), ops.Tanh(), ops.MakeExtraOutput("inside")),
        nn.Softplus(),
        ops.AddExtraInput("inside"),
        ops.AddExtraInput("kept"),
        ops.MakeExtraOutput("unread"),
    ).double()
    y, first, kept, last = whole(X)
    inside = torch.tanh(X)
    right = nn.functional.softplus(X + inside) + inside + X
    for a, b in ((y, right), (first, X), (kept, X), (last, right)):
        torch.testing.assert_close(a, b)
    check(whole, X, layouts=False)
    assert fusible.Sequential(ops.MakeExtraOutput("a"), ops.AddExtraInput("a"))(X).shape == X.shape
