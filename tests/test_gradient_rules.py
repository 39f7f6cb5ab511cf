"""The gradient rules G1 to G8: every combination against the same chain of `torch.nn` modules.

The full product: grad mode x input x frozen parameters x outputs used, for blocks of every kind, with default rules and
with none. Then what may change between forward and backward is in test_gradient_changes.py.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import Tensor
from twins import CASES, RULES, cases, close, tuple_of


@contextlib.contextmanager
def modes(*contexts):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


#: Per name: the contexts, from the outermost.
MODES = {
    "enabled": (),
    "no_grad": (torch.no_grad,),
    "inference": (torch.inference_mode,),
    "enabled in no_grad": (torch.no_grad, torch.enable_grad),
    "enabled in inference": (torch.inference_mode, torch.enable_grad),
}

#: Per name: from fresh values, the leaf whose gradient is looked at (or `None`), and what the block gets.
INPUTS = {
    "plain": lambda v: (None, v),
    "plain view": lambda v: (None, v.view(-1).view(v.shape)),
    "leaf": lambda v: (v.requires_grad_(), v),
    "leaf that is a view": lambda v: (leaf := v.view(-1).view(v.shape).requires_grad_(), leaf),
    "non-leaf": lambda v: (v.requires_grad_(), v * 1),
    "view of a leaf": lambda v: (v.requires_grad_(), v.view(-1).view(v.shape)),
    "transposed view of a non-leaf": lambda v: (v.requires_grad_(), (v * 1).T.contiguous().T),
}


def subsets(count: int):
    """Which parameters are frozen: every subset of few, else none, all, each alone, all but each."""
    if count <= 3:
        return [set(c) for n in range(count + 1) for c in itertools.combinations(range(count), n)]
    each = [{place} for place in range(count)]
    everything = set(range(count))
    return [set(), everything, *each, *[everything - one for one in each]]


def values(seed: int) -> Tensor:
    return torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(module, kind: str, extras: int, mode, used: int) -> dict:
    """One forward under `mode` and one backward outside of it, of the outputs in the bits of `used`."""
    leaves, given = zip(*[INPUTS[kind](values(place)) for place in range(1 + extras)], strict=True)
    before = [(t.requires_grad, t.grad_fn, t._version, t.detach().clone()) for t in given]
    for parameter in module.parameters():
        parameter.grad = None
    torch.manual_seed(7)
    with modes(*mode):
        outs = tuple_of(module(*given))
    for tensor, (wants, node, version, value) in zip(given, before, strict=True):
        assert tensor.requires_grad == wants
        assert tensor.grad_fn is node
        assert tensor._version == version
        assert torch.equal(tensor, value)
    wanted = [place for place, out in enumerate(outs) if out.requires_grad and used >> place & 1]
    if wanted:
        douts = [values(10 + place).view(outs[place].shape) for place in wanted]
        torch.autograd.backward([outs[place] for place in wanted], douts)
    grads = [leaf.grad if leaf is not None else None for leaf in leaves] + [p.grad for p in module.parameters()]
    return {"outs": outs, "grads": grads, "given": given}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", cases("mlp", "begins with make", "residual"))
def test_product(case, mode, rules):
    spec = CASES[case]
    block, twin = spec.make(RULES[rules])
    params = list(zip(block.parameters(), twin.parameters(), strict=True))
    count = len(tuple_of(twin(*[values(0)] * (1 + spec.extras))))
    records = mode in ("enabled", "enabled in no_grad")
    for frozen in subsets(len(params)):
        for place, pair in enumerate(params):
            for parameter in pair:
                parameter.requires_grad_(place not in frozen)
        for kind in INPUTS:
            for used in range(1, 2**count) if records else (0,):
                what = f"{kind}, frozen {sorted(frozen)}, used {used:b}"
                mine = run(block, kind, spec.extras, MODES[mode], used)
                theirs = run(twin, kind, spec.extras, MODES[mode], used)
                check_outputs(mine, theirs, records, what)
                for number, (a, b) in enumerate(zip(mine["grads"], theirs["grads"], strict=True)):
                    close(a, b, f"{what}: gradient {number}")


def check_outputs(mine: dict, theirs: dict, records: bool, what: str) -> None:
    """Values, `requires_grad`, `is_leaf` and `grad_fn`; no output is the object of an input or of another output."""
    seen = [*mine["given"]]
    nodes = set()
    for number, (a, b) in enumerate(zip(mine["outs"], theirs["outs"], strict=True)):
        close(a, b, f"{what}: output {number}")
        assert a.requires_grad == (records and b.requires_grad), f"{what}: output {number}"
        assert a.is_leaf == (not a.requires_grad), f"{what}: output {number}"
        assert (a.grad_fn is not None) == a.requires_grad, f"{what}: output {number}"
        assert not any(a is other for other in seen), f"{what}: output {number} is an object of the caller's"
        seen.append(a)
        nodes.add(a.grad_fn)
    nodes.discard(None)
    assert len(nodes) <= 1, f"{what}: the block is {len(nodes)} nodes"
