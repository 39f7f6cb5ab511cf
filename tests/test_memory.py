"""What is kept, and for how long: records, graphs, plans."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from test_gradient_rules import values
from torch.utils.checkpoint import checkpoint
from twins import CASES, RULES, cases, close, tuple_of

import fusible
import fusible.fuser
from fusible import Grads, Op, Out, ops

both_rules = pytest.mark.parametrize("rules", RULES)
every_case = pytest.mark.parametrize("case", cases("mlp"))


class Probe(Op):
    """Keeps a tensor of its own, and notes in its backward whose tensors are alive."""

    class Saved(fusible.Saved):
        own: torch.Tensor

    kept: list = []  # noqa: RUF012 - (op, weak reference), in the order of the forward pass
    log: list = []  # noqa: RUF012

    def reference(self, x):
        return x * 2

    def fwd(self, x):
        own = x.cos()
        Probe.kept.append((self, weakref.ref(own)))
        return Out(x * 2, saved=Probe.Saved(own))

    def bwd(self, saved, dy):
        Probe.log.append([op for op, own in Probe.kept if own() is not None])
        return Grads(dy * 2)


class Formula(Op):
    """An op that has only its formula, with two intermediates."""

    def reference(self, x):
        return x.sin().exp() * x


@pytest.fixture(scope="module", autouse=True)
def frozen_heap():
    """What was there before is no matter of these tests, and collections are quick without it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def clean():
    Probe.kept.clear()
    Probe.log.clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> int:
    return sum(own() is not None for _, own in Probe.kept)


# -- while it runs -----------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_records_are_dropped_step_by_step():
    """The record of step k is dead when step k - 1 runs."""
    block = fusible.Sequential(*[Probe() for _ in range(4)])
    y = block(values(0).requires_grad_())
    assert alive() == 4
    y.sum().backward()
    probes = list(block)
    assert Probe.log == [probes[:4], probes[:3], probes[:2], probes[:1]]


def test_records_stay_when_the_graph_is_retained():
    block = fusible.Sequential(Probe(), Probe())
    y = block(values(0).requires_grad_())
    y.sum().backward(retain_graph=True)
    assert alive() == 2
    assert len(Probe.log[-1]) == 2
    y.sum().backward()
    assert alive() == 0


def test_records_are_not_kept_without_gradients():
    block = fusible.Sequential(Probe(), ops.SiLU(), Probe())
    block(values(0))
    with torch.no_grad():
        y = block(values(0).requires_grad_())
    assert alive() == 0
    assert y.grad_fn is None


def test_intermediates_die_in_forward():
    """What the next step has taken is gone while the rest runs."""

    class Look(Op):
        def reference(self, x):
            return x + 0

        def fwd(self, x):
            seen.append([tensor() is not None for tensor in made])
            y = x + 0
            made.append(weakref.ref(y))
            return Out(y)

        def bwd(self, saved, dy):
            return Grads(dy)

    made, seen = [], []
    fusible.Sequential(Look(), Look(), Look(), Look())(values(0).requires_grad_())
    assert seen == [[], [True], [False, True], [False, False, True]]


# -- afterwards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modules", [lambda: [Probe(), ops.Linear(8, 8), Probe()], lambda: [Probe()]])
def test_nothing_is_reachable_after_backward(modules):
    block = fusible.Sequential(*modules()).double()
    h = values(0).requires_grad_() * 1
    gone = weakref.ref(h)
    y = block(h)
    del h
    node = y.grad_fn
    y.sum().backward()
    assert alive() == 0
    assert gone() is None
    assert node is y.grad_fn


@both_rules
@every_case
@pytest.mark.parametrize("finish", ["dropped", "backward", "retained"])
def test_no_reference_cycles(finish, case, rules):
    """Outputs, node and inputs die by reference counts, used or not; the collector is off."""
    block, _ = CASES[case].make(RULES[rules])
    given = [values(place).requires_grad_() * 1 for place in range(1 + CASES[case].extras)]
    outs = tuple_of(block(*given))
    watched = [weakref.ref(t) for t in (*given, *outs)]
    if finish != "dropped":
        sum(out.sum() for out in outs).backward(retain_graph=finish == "retained")
    del outs, given
    assert [ref() for ref in watched] == [None] * len(watched)
    assert gc.collect() < 200  # nothing of size waited for it


@both_rules
def test_unused_node_frees_its_records(rules):
    block = fusible.Sequential(ops.Linear(8, 8), Probe(), ops.Linear(8, 8), rules=RULES[rules]).double()
    y = block(values(0))
    assert alive() == 1
    del y
    assert alive() == 0


@both_rules
@every_case
def test_no_attributes_on_tensors(case, rules):
    block, _ = CASES[case].make(RULES[rules])
    given = [values(place).requires_grad_() for place in range(1 + CASES[case].extras)]
    outs = tuple_of(block(*given))
    sum(out.sum() for out in outs).backward()
    for tensor in (*given, *outs, *block.parameters()):
        assert vars(tensor) == {}


def test_no_state_on_modules():
    block, _ = CASES["mlp"].make()
    before = {name: set(vars(module)) for name, module in block.named_modules()}
    block(values(0)).sum().backward()
    assert {name: set(vars(module)) for name, module in block.named_modules()} == before


# -- what is kept ------------------------------------------------------------------------------------------------------


def packed_bytes(block, x, **kwargs) -> int:
    """Bytes of the distinct memory that backward keeps."""
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x, **kwargs)
    assert y is not None
    return sum(seen.values())


@pytest.mark.quick
def test_fields_that_nobody_needs_are_dropped():
    """Law 8: each by what it is read for."""
    row = 8 * 8 * 3  # bytes of [3, 8] in float64
    norm, linear, act = ops.RMSNorm(8), ops.Linear(8, 8), ops.SiLU()
    block = fusible.Sequential(norm, linear, act, rules=fusible.rules.NONE).double()
    x = values(0)
    assert packed_bytes(block, x) == 3 * row + 3 * 8 + 8 * 64  # x and rstd, the linear layer's x and weight, SiLU's x
    linear.weight.requires_grad_(False)
    assert packed_bytes(block, x) == 2 * row + 3 * 8 + 8 * 64
    norm.weight.requires_grad_(False)
    assert packed_bytes(block, x) == row
    linear.bias.requires_grad_(False)
    assert packed_bytes(block, x) == 0
    x = values(0).requires_grad_()
    assert packed_bytes(block, x) == 2 * row + 3 * 8 + 8 * 64 + 8 * 8  # all but the linear layer's x


def test_rules_that_forget_keep_less():
    modules = [ops.Linear(8, 64), ops.GELU(), ops.Linear(64, 8)]
    lean = fusible.Sequential(*modules, rules=fusible.rules.LEAN).double()
    full = fusible.Sequential(*modules, rules=fusible.rules.NONE).double()
    x = values(0)
    assert packed_bytes(lean, x) == packed_bytes(full, x) - 3 * 64 * 8
    grads = []
    for block in (lean, full):
        x = values(0).requires_grad_()
        grads.append(torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()]))
    for a, b in zip(*grads, strict=True):
        close(a, b)


def test_a_rewrite_that_keeps_its_input_alone():
    modules = [ops.Linear(8, 64, bias=False), ops.SwiGLU(), ops.Linear(32, 8, bias=False)]
    block = fusible.Sequential(*modules, rules=(fusible.rules.gated_mlp,)).double()
    x = values(0)
    weights = sum(p.numel() for p in block.parameters()) * 8
    assert packed_bytes(block, x) == weights + 3 * 8 * 8


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [Probe, Formula])
def test_a_checkpoint_keeps_its_saving(kind, reentrant):
    """Several blocks inside one: after forward nothing of theirs is alive but the last output."""
    blocks = torch.nn.Sequential(*[fusible.Sequential(kind(), ops.SiLU(), kind()) for _ in range(3)])
    x = torch.randn(11, 13, requires_grad=True)
    before = tensors_of(x.shape)
    y = checkpoint(blocks, x, use_reentrant=reentrant)
    assert alive() == 0
    assert tensors_of(x.shape) - before == 1
    y.sum().backward()
    assert alive() == 0


def tensors_of(shape) -> int:
    """Distinct memory of tensors of this shape in the whole process."""
    return len(
        {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == shape}
    )


@pytest.mark.parametrize("modules", [[Formula], [Formula, ops.SiLU, Formula], [ops.GELU, Formula]])
def test_an_op_of_a_formula_keeps_what_its_graph_reads(modules):
    """Under saved-tensor hooks every tensor of it passes them, and nothing is held beside."""
    block = fusible.Sequential(*[kind() for kind in modules])
    x = torch.randn(11, 13, dtype=torch.float64, requires_grad=True)

    def pack(tensor):
        return bytearray(tensor.numpy().tobytes()), tensor.shape

    def unpack(packed):
        return torch.frombuffer(packed[0], dtype=torch.float64).view(packed[1])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        before = tensors_of(x.shape)
        y = block(x)
        assert tensors_of(x.shape) - before == 1
    y.sum().backward()
    close(x.grad, torch.autograd.grad(block.reference(x).sum(), x)[0])


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch):
    """Counts the plans that are made."""
    made, make = [], fusible.fuser.make_plan
    monkeypatch.setattr(fusible.fuser, "make_plan", lambda *args: made.append(1) or make(*args))
    return made


def test_one_plan_for_twenty_lengths_and_ranks_and_strides(planned):
    block, _ = CASES["mlp"].make()
    for rows in range(1, 21):
        block(torch.randn(rows, 8, dtype=torch.float64)).sum().backward()
    block(torch.randn(8, dtype=torch.float64))
    block(torch.randn(2, 3, 8, dtype=torch.float64))
    block(torch.randn(8, 4, dtype=torch.float64).t())
    block(torch.randn(1, 8, dtype=torch.float64).expand(5, 8))
    assert len(planned) == 1


@pytest.mark.quick
def test_one_plan_per_kind_of_call(planned):
    block = fusible.Sequential(ops.Linear(8, 8), ops.Dropout(0.5), ops.Linear(8, 8))
    x = torch.randn(3, 8)
    changes = [
        lambda: x,
        lambda: x.clone().requires_grad_(),
        lambda: x.double(),
        lambda: block.eval() and x,
        lambda: block.train() and block[0].weight.requires_grad_(False) is not None and x,
    ]
    for number, change in enumerate(changes, 1):
        for _ in range(2):
            block(change())
            assert len(planned) == number
    contexts = [
        torch.no_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: fusible.use_rules(fusible.rules.NONE),
        lambda: fusible.kernels.use("reference"),
    ]
    for number, context in enumerate(contexts, 1 + len(changes)):
        for _ in range(2):
            with context():
                block(x)
            assert len(planned) == number
    block(x)
    assert len(planned) == number


def test_the_cache_of_plans_is_bounded(monkeypatch, planned):
    monkeypatch.setattr(fusible.fuser, "MAX_PLANS", 4)
    block = fusible.Sequential(ops.SiLU())
    widths = range(1, 12)
    for width in widths:
        block(torch.randn(2, width, requires_grad=True)).sum().backward()
    fuser = block._state.single
    assert len(planned) == len(widths)
    assert plans_of(fuser) <= 4
    for number in range(40):
        block_rules = (a_rule(number),)
        with fusible.use_rules(block_rules):
            block(torch.randn(2, 3))
    assert plans_of(fuser) <= 4 * fusible.fuser.MAX_RULE_SETS
    assert len(fuser.by_rules) <= fusible.fuser.MAX_RULE_SETS


def plans_of(fuser) -> int:
    return sum(len(plans) for plans in fuser.by_rules.values())


def a_rule(number: int):
    def rule(scale: ops.ConstantScale, act: ops.SiLU, /, x):
        raise AssertionError

    rule.__name__ = f"rule_{number}"
    rule.__annotations__ = {"scale": ops.ConstantScale, "act": ops.SiLU}
    return fusible.forward(rule)


def test_shapes_that_a_plan_remembers_are_bounded(monkeypatch):
    monkeypatch.setattr(fusible.executable, "MAX_SHAPES", 4)
    block = fusible.Sequential(ops.SiLU())
    for rows in range(1, 12):
        block(torch.randn(rows, 3))
    (plans,) = block._state.single.by_rules.values()
    assert all(len(executable.shapes) <= 4 for executable in plans.values())


@both_rules
def test_hooks_on_the_block_itself_cost_no_new_plan(planned, rules):
    """They see the block run; nothing in it is apart for them."""
    block, _ = CASES["mlp"].make(RULES[rules])
    calls = []
    block(values(0))
    with contextlib.ExitStack() as stack:
        for register in (block.register_forward_hook, block.register_forward_pre_hook):
            stack.callback(register(lambda *args: calls.append(1)).remove)
        block(values(0))
        block(values(0))
    assert len(calls) == 4
    assert len(planned) == 1


def test_global_hooks_are_looked_at_once(planned):
    block = fusible.Sequential(ops.Linear(8, 8), ops.SiLU()).double()
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *args: seen.append(type(module).__name__)
    )
    try:
        for _ in range(3):
            block(values(0))
            state = block._state
        assert block(values(0)) is not None
        assert block._state is state
    finally:
        handle.remove()
    assert seen == ["Linear", "SiLU", "Sequential"] * 4
    block(values(0))
    assert len(planned) == 1
