"""Ops that read the parameters of modules that are no twins of theirs: other names, two owners, transposed weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusible.op import Op, view
from fusible.ops import (
    GEGLU,
    GELU,
    QGEGLU,
    QGELU,
    BasicLinear,
    Bias,
    PairLinear,
    ReGLU,
    ReLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)

__all__ = ["GATES", "borrow", "gate_of", "pair", "transposed"]


class _Elsewhere(dict):
    """Stands for an op's `_parameters`: each is read where it lives, at each look."""

    def __init__(self, places: dict[str, tuple[dict[str, Any], str]], transpose: bool = False) -> None:
        super().__init__(places)
        self.transpose = transpose

    def __getitem__(self, name: str) -> Tensor:
        owner, key = super().__getitem__(name)
        found = owner[key]
        return found.t() if self.transpose else found

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


def borrow(kind: type[Op], module: torch.nn.Module, **options: Any) -> Any:
    """An op of type `kind` with the module's parameters and hooks, and options of its own."""
    op = kind.__new__(kind)
    op.__dict__ = {**module.__dict__, **options}
    return op


def pair(first: torch.nn.Module, second: torch.nn.Module) -> PairLinear:
    """Two linear layers without biases over one input, as one op."""
    places = {"first": (first._parameters, "weight"), "second": (second._parameters, "weight")}
    op = borrow(PairLinear, first)
    op.__dict__["_parameters"] = _Elsewhere(places)
    return op


def transposed(module: torch.nn.Module) -> Iterator[Op]:
    """The two ops of a linear layer whose weight is stored as [i, o].

    The chain reads a transposed view of the weight, and autograd turns its gradient back.
    """
    op = borrow(BasicLinear, module)
    op.__dict__["_parameters"] = _Elsewhere({"weight": (module._parameters, "weight")}, transpose=True)
    yield op
    yield view(Bias, _bias_alone(module))


def _bias_alone(module: torch.nn.Module) -> torch.nn.Module:
    bias = borrow(Bias, module)
    bias.__dict__["_parameters"] = _Elsewhere({"bias": (module._parameters, "bias")})
    return bias


#: The gated activation whose gate is this activation.
GATES: dict[type, Any] = {
    SiLU: lambda act: SwiGLU(),
    GELU: lambda act: GEGLU(act.approximate),
    QGELU: lambda act: QGEGLU(),
    ReLU: lambda act: ReGLU(),
    SReLU: lambda act: SReGLU(),
}


def gate_of(act: Op) -> Op | None:
    """`act(a) b` as one op, or `None` if there is none."""
    make = GATES.get(type(act))
    return None if make is None else make(act)
