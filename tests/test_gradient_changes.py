"""In-place changes of what a block gave or got: allowed with the right gradient, or autograd's own error, never a
wrong one.

Each change is made to the block and to its twin. Where the block raises the twin raises too, or the tensor shares
memory
with another that autograd cannot follow (G4); where it does not raise, its gradients are the twin's.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from test_gradient_rules import INPUTS, subsets, values
from torch import Tensor
from twins import CASES, RULES, cases, close, tuple_of

AUTOGRADS_ERROR = re.compile(
    "modified by an inplace operation|is a view|changed in place|modified inplace|in-place operation"
)
KINDS = ("plain", "leaf", "non-leaf", "view of a leaf")


def delta(like: Tensor) -> Tensor:
    return values(30).reshape(-1)[: like.numel()].view(like.shape)


CHANGES = {
    "mul_": lambda t: t.mul_(2),
    "add_ a trained tensor": lambda t: t.add_(delta(t).requires_grad_()),
    "relu_": lambda t: t.relu_(),
    "zero_ a part": lambda t: t[..., :2].zero_(),
}


class Run:
    """One forward pass, something done to its tensors, and a backward pass; an error ends it."""

    def __init__(self, module, spec, kind: str) -> None:
        self.module = module
        self.leaves, self.given = zip(*[INPUTS[kind](values(place)) for place in range(1 + spec.extras)], strict=True)
        for parameter in module.parameters():
            parameter.grad = None
        self.error = ""
        self.where = ""
        torch.manual_seed(7)
        self.outs = tuple_of(module(*self.given))

    def attempt(self, where: str, act) -> bool:
        try:
            act()
        except RuntimeError as error:
            assert AUTOGRADS_ERROR.search(str(error)), error
            self.error, self.where = str(error), where
        return not self.error

    def loss(self) -> Tensor:
        """Reads every output and every input as they are now."""
        terms = [(t * values(10 + place).view(t.shape)).sum() for place, t in enumerate((*self.outs, *self.given))]
        return torch.stack(terms).sum()

    def backward(self, loss: Tensor) -> None:
        if loss.requires_grad:
            loss.backward()

    def grads(self) -> list[Tensor | None]:
        return [t.grad if t is not None else None for t in (*self.leaves, *self.module.parameters())]


class Pair:
    """A block and its twin, run again and again from the same state."""

    def __init__(self, case: str, rules: str) -> None:
        self.spec = CASES[case]
        self.block, self.twin = self.spec.make(RULES[rules])
        self.start = [p.detach().clone() for p in self.block.parameters()]
        self.count = len(tuple_of(self.twin(*[values(0)] * (1 + self.spec.extras))))

    def run(self, kind: str, frozen: set[int], twin: bool = False) -> Run:
        module = self.twin if twin else self.block
        for place, (parameter, value) in enumerate(zip(module.parameters(), self.start, strict=True)):
            parameter.data.copy_(value)
            parameter.requires_grad_(place not in frozen)
        return Run(module, self.spec, kind)

    def reads(self, kind: str, frozen: set[int], pick) -> bool:
        """Whether the block's backward reads a tensor: whether other numbers in it, put there unseen, change a
        gradient."""
        found = []
        for unseen in (False, True):
            run = self.run(kind, frozen)
            loss = weighted(run.outs)
            if unseen:
                pick(run).data.mul_(-2)  # does not count as a change
            run.backward(loss)
            found.append(run.grads())
        return any(a is not None and not torch.equal(a, b) for a, b in zip(*found, strict=True))


def compare(mine: Run, theirs: Run, what: str) -> None:
    for number, (a, b) in enumerate(zip(mine.grads(), theirs.grads(), strict=True)):
        close(a, b, f"{what}: gradient {number}")


def weighted(outs) -> Tensor:
    return torch.stack([(out * values(10 + place).view(out.shape)).sum() for place, out in enumerate(outs)]).sum()


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("case", cases("ends in tanh", "ends in make"))
def test_outputs_changed(case, rules):
    pair = Pair(case, rules)
    for frozen in (set(), set(range(len(pair.start)))):
        for kind, place in itertools.product(KINDS, range(pair.count)):
            read = pair.reads(kind, frozen, lambda run, place=place: run.outs[place])
            for name, change in CHANGES.items():
                runs = []
                for twin in (False, True):
                    runs.append(run := pair.run(kind, frozen, twin))
                    if run.attempt("change", lambda run=run: change(run.outs[place])):
                        run.attempt("backward", lambda run=run: run.backward(run.loss()))
                what = f"{kind}, frozen {sorted(frozen)}, output {place} {name}"
                check_changed_output(*runs, place in pair.spec.shared, read, what)


def check_changed_output(mine: Run, theirs: Run, shared: bool, read: bool, what: str) -> None:
    if not mine.error and not theirs.error:
        compare(mine, theirs, what)
        for number, (a, b) in enumerate(zip((*mine.outs, *mine.given), (*theirs.outs, *theirs.given), strict=True)):
            close(a, b, f"{what}: value {number} afterwards")
    elif not mine.error:
        raise AssertionError(f"{what}: the twin says {theirs.error}, the block says nothing")
    elif not shared:
        assert mine.where == "backward", f"{what}: the block computed this output alone, yet {mine.error}"
        assert read, f"{what}: backward does not read it, yet {mine.error}"


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("case", CASES)
def test_inputs_changed_and_outputs_used(case, rules):
    """A changed input changes a passed-through output too: that raises, or has the twin's gradient."""
    pair = Pair(case, rules)
    for frozen in (set(), set(range(len(pair.start)))):
        for kind, place in itertools.product(("plain", "non-leaf"), range(1 + pair.spec.extras)):
            for name, change in CHANGES.items():
                runs = []
                for twin in (False, True):
                    runs.append(run := pair.run(kind, frozen, twin))
                    if run.attempt("change", lambda run=run: change(run.given[place])):
                        run.attempt("backward", lambda run=run: run.backward(run.loss()))
                what = f"{kind}, frozen {sorted(frozen)}, input {place} {name}"
                if not runs[0].error:
                    assert not runs[1].error, f"{what}: the twin says {runs[1].error}, the block says nothing"
                    compare(*runs, what)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("what", ["inputs", "parameters"])
@pytest.mark.parametrize("case", cases("residual"))
def test_inputs_and_parameters_changed(case, what, rules):
    """After forward, without autograd: raises exactly if a backward step reads it, else the gradients are unharmed."""
    pair = Pair(case, rules)
    kinds = ("plain", "leaf", "non-leaf") if what == "inputs" else ("plain", "leaf")
    places = range(1 + pair.spec.extras if what == "inputs" else len(pair.start))
    for frozen, kind, place in itertools.product(subsets(len(pair.start)), kinds, places):

        def pick(run, place=place):
            return (run.given if what == "inputs" else list(run.module.parameters()))[place]

        read = pair.reads(kind, frozen, pick)
        untouched = pair.run(kind, frozen)
        untouched.backward(weighted(untouched.outs))
        wanted = untouched.grads()
        run = pair.run(kind, frozen)
        loss = weighted(run.outs)
        pick(run).detach().mul_(2)  # shares its version counter
        run.attempt("backward", lambda run=run, loss=loss: run.backward(loss))
        where = f"{kind}, frozen {sorted(frozen)}, {what} {place}"
        assert bool(run.error) == read, f"{where}: backward {'reads' if read else 'does not read'} it, {run.error}"
        if not read:
            for number, (a, b) in enumerate(zip(run.grads(), wanted, strict=True)):
                close(a, b, f"{where}: gradient {number}")
