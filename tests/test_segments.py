"""Long chains as several autograd nodes: right like one, and earlier with their gradients."""

from __future__ import annotations

import pytest
import torch
from blocks import BLOCKS, SETS

import fusible
from fusible import ops, segments
from fusible.testing import check


@pytest.fixture
def short(monkeypatch):
    """Every place is worth a cut."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)


def layer(width: int) -> list:
    return [
        ops.Residual(ops.RMSNorm(width), ops.Linear(width, 2 * width), ops.SwiGLU(), ops.Linear(width, width)),
        ops.Residual(ops.LayerNorm(width), ops.Linear(width, width), ops.GELU(), ops.Linear(width, width)),
    ]


def cuts(block, x):
    fuser, values = block.single_chain(x)
    return fuser.find(values, block.rules)[0].plan.cuts


def nodes(y) -> list:
    """The block's nodes behind an output, the last first."""
    found, todo = [], [y.grad_fn]
    while todo:
        node = todo.pop(0)
        if type(node).__name__.startswith("Fused") and node not in found:
            found.append(node)
            todo += [behind for behind, _ in node.next_functions if behind is not None]
    return found


@pytest.mark.parametrize("rules", ["default", "none", "lean"])
@pytest.mark.parametrize("name", ["two_layers", "dropouts", "post_norm", "linear_residual", "nested"])
def test_segments_keep_every_gradient_rule(short, name, rules):
    if name == "nested":
        inner = ops.Residual(ops.LayerNorm(8), ops.Residual(ops.RMSNorm(8), ops.Linear(8, 8)), ops.Linear(8, 8))
        block = fusible.Sequential(inner, *BLOCKS["two_layers"](), rules=SETS[rules])
    else:
        block = fusible.Sequential(*BLOCKS[name](), rules=SETS[rules])
    x = torch.randn(3, 8, requires_grad=True)
    gradcheck = name in ("two_layers", "nested")
    check(block, x, gradcheck=gradcheck)
    if name == "two_layers":
        assert cuts(block, x.double() if gradcheck else x)


def test_segments_give_the_bits_of_one_node(monkeypatch):
    block = fusible.Sequential(*layer(16), *layer(16), ops.RMSNorm(16))
    x = torch.randn(5, 16, requires_grad=True)
    inputs = [x, *block.parameters()]
    whole = torch.autograd.grad(block(x).square().sum(), inputs)
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    cut = fusible.Sequential(*block)
    y = cut(x)
    assert len(nodes(y)) > 2
    for a, b in zip(whole, torch.autograd.grad(y.square().sum(), inputs), strict=True):
        assert torch.equal(a, b)


def test_gradients_of_late_layers_leave_before_backward_reaches_the_first(short):
    block = fusible.Sequential(*layer(16), *layer(16), *layer(16))
    y = block(torch.randn(4, 16))
    count = len(nodes(y))
    ready: list[int] = []
    for place, parameter in enumerate(block.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, place=place: ready.append(place))
    nodes(y)[-1].register_prehook(lambda _: ready.append(-1))
    y.sum().backward()
    total = len(list(block.parameters()))
    assert sorted(ready) == list(range(-1, total))
    before = ready[: ready.index(-1)]
    assert len(before) > total * (count - 2) / count
    assert max(ready[len(before) + 1 :]) < min(before)


@pytest.mark.quick
def test_cuts_lie_between_branches_and_wait_for_enough_parameters(monkeypatch):
    block = fusible.Sequential(*[each for _ in range(4) for each in layer(16)])
    x = torch.randn(2, 16)
    assert cuts(block, x) == ()
    size = sum(p.numel() * 4 for p in fusible.Sequential(*layer(16)).parameters())
    monkeypatch.setattr(segments, "SEGMENT_BYTES", size)
    again = fusible.Sequential(*block)
    fuser, values = again.single_chain(x)
    plan = fuser.find(values, again.rules)[0].plan
    starts = [str(plan.nodes[cut.start]) for cut in plan.cuts]
    assert len(starts) == 3
    assert all("op 2" in s or "op 4" in s or "op 6" in s for s in starts), starts
    assert all(len(cut.values) <= 2 for cut in plan.cuts)
    note = f"4 autograd nodes, so that gradients leave early; a new one begins at {plan.nodes[plan.cuts[0].start].path}"
    assert note in str(again.explain(x))


@pytest.mark.quick
def test_no_cut_where_nothing_would_leave_early(short):
    block = fusible.Sequential(*layer(8), *layer(8))
    x = torch.randn(2, 8, requires_grad=True)
    with torch.no_grad():
        assert cuts(block, x) == ()
    for parameter in block.parameters():
        parameter.requires_grad_(False)
    assert cuts(block, x) == ()
    assert len(nodes(block(x))) == 1


def test_a_frozen_beginning_has_no_node(short):
    block = fusible.Sequential(*layer(8), *layer(8))
    for parameter in block[:2].parameters():
        parameter.requires_grad_(False)
    x = torch.randn(2, 8)
    y = block(x)
    trained = list(block[2:].parameters())
    y.sum().backward()
    assert {p for node in nodes(y) for p in _leaves(node)} == set(trained)
    want = torch.autograd.grad(block.reference(x).sum(), trained)
    for parameter, gradient in zip(trained, want, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def _leaves(node) -> list:
    return [behind.variable for behind, _ in node.next_functions if hasattr(behind, "variable")]


def test_a_parameter_of_two_segments_gets_the_sum(short):
    shared = ops.Linear(8, 8)
    block = fusible.Sequential(ops.Residual(ops.RMSNorm(8), shared), *layer(8), ops.Residual(ops.RMSNorm(8), shared))
    x = torch.randn(3, 8, requires_grad=True)
    assert len(nodes(block(x))) > 1
    check(block, x, gradcheck=True)


def test_extra_inputs_and_outputs_of_any_segment(short):
    block = fusible.Sequential(
        *layer(8),
        ops.MakeExtraOutput(),
        *layer(8),
        ops.AddExtraInput(),
        *layer(8),
        ops.MakeExtraOutput("late"),
        ops.SiLU(),
    )
    x, extra = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    assert len(nodes(block(x, extra)[0])) > 2
    check(block, x, extra)


@pytest.mark.parametrize("reentrant", [True, False])
def test_segments_under_checkpointing(short, reentrant):
    from torch.utils.checkpoint import checkpoint

    block = fusible.Sequential(*layer(8), *layer(8))
    x = torch.randn(3, 8, requires_grad=True)
    inputs = [x, *block.parameters()]
    want = torch.autograd.grad(block(x).sum(), inputs)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    for tensor, gradient in zip(inputs, want, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=0, atol=0)
