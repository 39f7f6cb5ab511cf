"""The standard blocks of `blocks.py`: each set of rules, each subset of the rules that apply, each dtype."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from blocks import BLOCKS, SETS, SHIPPED, fired, inputs, make
from rows import FLOATS

import fusible
from fusible import ops
from fusible.rule import RuleSet
from fusible.testing import check


@pytest.mark.parametrize("rules", SETS)
@pytest.mark.parametrize("name", BLOCKS)
def test_every_rule_set(name, rules):
    layouts = name != "dropouts"  # torch lays a mask out as the tensor is, and a sum's strides are the first operand's
    check(make(name, SETS[rules]), *inputs(name), layouts=layouts, gradcheck=rules == "default")


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_every_dtype(name, dtype):
    check(make(name, SETS["all"], dtype), *inputs(name, dtype), layouts=False, frozen=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rules", ["default", "lean"])
@pytest.mark.parametrize("name", BLOCKS)
def test_autocast(name, rules, dtype):
    with torch.autocast("cpu", torch.bfloat16):
        check(make(name, SETS[rules], torch.float32), *inputs(name, dtype), layouts=False, frozen=False)


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 1, 3), (0,), (0, 3)], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_every_rank(name, leading):
    check(make(name, SETS["all"]), *inputs(name, leading=leading), layouts=False, frozen=False)


@functools.cache
def applying(name: str, grad: bool) -> list[str]:
    with torch.set_grad_enabled(grad):
        return [rule for rule in SHIPPED if fired(make(name, RuleSet([SHIPPED[rule]])), *inputs(name))]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "two_layers"])
def test_every_subset_of_the_rules_that_apply(name, grad):
    rules = applying(name, grad)
    for size in range(len(rules) + 1):
        for subset in itertools.combinations(rules, size):
            block = make(name, RuleSet(SHIPPED[rule] for rule in subset))
            with torch.set_grad_enabled(grad):
                assert fired(block, *inputs(name)) <= set(subset)
                check(block, *inputs(name), layouts=False, frozen=False)


def test_the_standard_blocks_need_every_rule():
    """No row: the test above would pass on blocks that no rule fits."""
    found = {rule for name in BLOCKS for grad in (True, False) for rule in applying(name, grad)}
    assert found == set(SHIPPED)


@pytest.mark.quick
def test_one_plan_for_every_length_and_rank():
    """No row: the number of plans is not a value (law 4)."""
    block = make("mlp")
    fuser, _ = block.single_chain(*inputs("mlp"))
    for rows in range(20):
        block(torch.ones(rows, 8, dtype=torch.float64))
        block(torch.ones(2, rows, 8, dtype=torch.float64).transpose(0, 1))
    block(torch.ones(8, dtype=torch.float64))
    assert len(fuser.plans) == 1


@pytest.mark.quick
@pytest.mark.parametrize(
    "change",
    [
        lambda block: block.eval(),
        lambda block: block[0][1].weight.requires_grad_(False),
        lambda block: block[0][1].register_parameter("bias", None),
        lambda block: block.float(),
        lambda block: setattr(block[0][1], "weight", torch.nn.Parameter(torch.ones(12, 8, dtype=torch.float64))),
    ],
    ids=["training", "requires_grad", "presence", "dtype", "replaced"],
)
def test_what_changes_on_a_module_is_seen(change):
    """No row: one block, changed between two calls."""
    block = make("dropouts" if "eval" in change.__code__.co_names else "mlp")
    x = inputs("mlp")[0].requires_grad_()
    block(x)
    change(block)
    dtype = next(block.parameters()).dtype
    check(block, x.detach().to(dtype), layouts=False, frozen=False)


@pytest.mark.quick
def test_a_channel_with_one_producer_and_many_consumers_sums_its_gradients():
    """No row: the right gradient is known in closed form, 1 + 2 + 4 consumers deep."""
    block = fusible.Sequential(ops.MakeExtraOutput("a"), *[ops.AddExtraInput("a") for _ in range(6)])
    x = torch.ones(3, requires_grad=True)
    y = block(x)
    y.sum().backward()
    assert torch.equal(y, torch.full((3,), 7.0))
    assert torch.equal(x.grad, torch.full((3,), 7.0))


def test_shared_inputs_by_keyword():
    """No row: rows have one op; here two ops read one declared input, and another goes by position."""
    block = fusible.Sequential(
        ops.AddExtraInput("positions"), ops.Linear(8, 8), ops.AddExtraInput(), ops.AddExtraInput("positions"),
        inputs=("positions",),
    ).double()  # fmt: skip
    a, b, c = (torch.randn(3, 8, dtype=torch.float64) for _ in range(3))
    check(block, a, b, positions=c, gradcheck=True)


@pytest.mark.parametrize("rules", SETS)
def test_an_op_that_appears_twice_and_tied_weights(rules):
    """No row: a row's op appears once."""
    linear, tied = ops.Linear(8, 8), ops.Linear(8, 8, bias=False)
    tied.weight = linear.weight
    for modules in ([linear, ops.Tanh(), linear], [linear, ops.GELU(), tied], [ops.Residual(linear, linear), linear]):
        check(fusible.Sequential(*modules, rules=SETS[rules]).double(), *inputs("mlp"), layouts=False)
