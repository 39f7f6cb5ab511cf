"""Threads: settings are per thread, blocks and plans may be shared, backward may run anywhere."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_gradient_rules import values
from torch import nn
from twins import CASES, RULES, close

import fusible
import fusible.fuser
from fusible import Op, ops
from fusible.kernels import registry

both_rules = pytest.mark.parametrize("rules", RULES)


def together(*functions):
    """Runs functions in threads that start at once; returns their results, or raises what they raised."""
    barrier = threading.Barrier(len(functions))

    def run(function):
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(run, function) for function in functions]]


@pytest.fixture
def often():
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.quick
def test_use_rules_and_kernels_use_hold_in_their_thread_alone():
    block = fusible.Sequential(ops.Linear(8, 8), ops.ReLU()).double()
    seen = {}

    def look(name):
        seen[name] = ("linear_activation" in str(block.explain(values(0))), registry.forced())

    with fusible.use_rules(fusible.rules.NONE), fusible.kernels.use("reference"):
        look("here")
        together(lambda: look("there"))
    look("after")
    assert seen == {"here": (False, "reference"), "there": (True, None), "after": (True, None)}


def test_use_rules_nests_and_is_undone_by_errors():
    block = fusible.Sequential(ops.Linear(8, 8), ops.ReLU()).double()

    def fused():
        return "linear_activation" in str(block.explain(values(0)))

    with fusible.use_rules(fusible.rules.NONE):
        with fusible.use_rules(fusible.rules.DEFAULT):
            assert fused()
        assert not fused()
        with pytest.raises(KeyError), fusible.use_rules(fusible.rules.DEFAULT):
            raise KeyError
        assert not fused()
    assert fused()


def train(block: nn.Module, seed: int, steps: int = 40):
    """Parameters after some steps on data of one's own, of changing lengths."""
    optimizer = torch.optim.SGD(block.parameters(), lr=0.05)
    for step in range(steps):
        x = torch.randn(1 + step % 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + step))
        optimizer.zero_grad()
        block(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in block.parameters()]


@both_rules
def test_two_threads_train_two_blocks(rules):
    blocks, twins = zip(*[CASES[case].make(RULES[rules]) for case in ("mlp", "residual")], strict=True)
    want = [train(twin, seed) for seed, twin in enumerate(twins)]
    got = together(*[lambda b=block, s=seed: train(b, s) for seed, block in enumerate(blocks)])
    for mine, theirs in zip(got, want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            close(a, b)


def gradients(block, seed: int, rules, times: int = 25):
    """The gradients of many calls of all kinds, the last of each kind."""
    found = {}
    with fusible.use_rules(rules):
        for number in range(times):
            for width_rows in (1, 2 + number % 3):
                x = values(seed)[:width_rows].clone().requires_grad_(number % 2 == 0)
                wanted = [*([x] if x.requires_grad else []), *block.parameters()]
                y = block(x)
                found[width_rows, number % 2] = [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]
    return found


@pytest.mark.parametrize("case", ["mlp", "residual"])
def test_one_block_in_several_threads(case):
    """Each with other rules and other data; plans are made and used at once."""
    block, twin = CASES[case].make()
    threads = list(enumerate([*RULES.values(), fusible.rules.LEAN, RULES["default"]]))
    want = [gradients(twin, seed, rules) for seed, rules in threads]
    got = together(*[lambda s=seed, r=rules: gradients(block, s, r) for seed, rules in threads])
    for mine, theirs in zip(got, want, strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            for a, b in zip(mine[key], theirs[key], strict=True):
                close(a, b)


def test_a_thread_never_gets_plans_of_another_threads_rules(often):
    """Two threads call one block by turns, each with rules of its own, which leave their marks."""

    class Marked(Op):
        def reference(self, x):
            return x

    first, second = (fusible.forward(_plain_rule(Marked, number)) for number in (1, 2))
    block = fusible.Sequential(Marked())

    def run(rule, number):
        with fusible.use_rules((rule,)) as rules, torch.no_grad():
            for _ in range(3000):
                (y,) = block._state.single((torch.zeros(1),), rules)
                if y.item() != number:
                    return y.item()
        return number

    assert together(lambda: run(first, 1), lambda: run(second, 2)) == [1, 2]


def _plain_rule(kind, number):
    def rule(op: kind, /, x):
        return fusible.Out(x + number)

    rule.__annotations__ = {"op": kind}
    rule.__name__ = f"plus_{number}"
    return rule


def test_the_cache_is_bounded_while_threads_fill_it(monkeypatch):
    monkeypatch.setattr(fusible.fuser, "MAX_PLANS", 3)
    block = fusible.Sequential(ops.SiLU(), ops.Tanh())

    def fill(first):
        for number in range(60):
            x = torch.randn(2, 1 + (first + number) % 9, requires_grad=True)
            block(x).sum().backward()
            block(x).sum().backward()

    together(*[lambda s=start: fill(s) for start in range(4)])
    assert len(block._state.single.plans) <= 3


@both_rules
def test_backward_in_another_thread(rules):
    """Also under other rules there, and with autocast on there: a backward is its forward's."""
    block, twin = CASES["mlp"].make(RULES[rules])
    x, x2 = values(0).requires_grad_(), values(0).requires_grad_()
    y, y2 = block(x).square().sum(), twin(x2).square().sum()

    def backward():
        with fusible.use_rules(fusible.rules.NONE), torch.autocast("cpu", torch.bfloat16):
            y.backward()

    together(backward)
    y2.backward()
    close(x.grad, x2.grad)
    for a, b in zip(block.parameters(), twin.parameters(), strict=True):
        close(a.grad, b.grad)


def test_backward_in_two_threads_of_one_retained_graph():
    block, _ = CASES["mlp"].make()
    x = values(0).requires_grad_()
    y = block(x)
    want = torch.autograd.grad(y.sum(), [x, *block.parameters()], retain_graph=True)
    found = together(*[lambda: torch.autograd.grad(y.sum(), [x, *block.parameters()], retain_graph=True)] * 3)
    for grads in found:
        for a, b in zip(grads, want, strict=True):
            close(a, b)
