"""Blocks of every kind, each with the same chain of `torch.nn` modules beside it, run module by module by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fusible
from fusible import ops


class Make(NamedTuple):
    """Hands x on and out."""

    name: str | None = None
    keep: bool = False


class Add(NamedTuple):
    """Adds an extra input, or what was made under this name."""

    name: str | None = None


class SwiGLU(nn.Module):
    def forward(self, x):
        a, b = x.chunk(2, -1)
        return nn.functional.silu(a) * b


class Reshaped(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x):
        return x.reshape(self.shape)


class Add1(nn.Module):
    """`x + f(x)`."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.f = nn.Sequential(*modules)

    def forward(self, x):
        return x + self.f(x)


class Twin(nn.Module):
    """Modules in a row, with extra inputs and outputs between them."""

    def __init__(self, *steps: nn.Module | Make | Add) -> None:
        super().__init__()
        self.steps = steps
        self.modules_ = nn.ModuleList([step for step in steps if isinstance(step, nn.Module)])

    def forward(self, x: Tensor, *extras: Tensor):
        rest = list(extras)
        named: dict[str, Tensor] = {}
        outs: list[tuple[str | None, Tensor, bool]] = []
        for step in self.steps:
            if isinstance(step, Add):
                x = x + (named[step.name] if step.name else rest.pop(0))
            elif isinstance(step, Make):
                outs.append((step.name, x, step.keep))
                named[step.name] = x
            else:
                x = step(x)
        read = {step.name for step in self.steps if isinstance(step, Add)}
        kept = [out for name, out, keep in outs if name is None or keep or name not in read]
        return (x, *kept) if kept else x


class Case(NamedTuple):
    """How to build a block and its twin, for x of shape [3, 8] and `extras` of the same shape."""

    block: Callable[[], list]
    twin: Callable[[], list]
    extras: int = 0
    #: Outputs that share memory with the input, or with each other: in-place changes of them must raise.
    shared: tuple[int, ...] = ()

    def make(self, rules=None, dtype=torch.float64) -> tuple[fusible.Sequential, Twin]:
        """A block and its twin with the same random parameters."""
        block, twin = fusible.Sequential(*self.block(), rules=rules), Twin(*self.twin())
        if dtype is not torch.get_default_dtype():
            block, twin = block.to(dtype), twin.to(dtype)
        pairs = zip(block.parameters(), twin.parameters(), strict=True)
        with torch.no_grad():
            for mine, theirs in pairs:
                mine.copy_(torch.randn_like(mine) * 0.5)
                theirs.copy_(mine)
        return block, twin


CASES = {
    "identity": Case(lambda: [ops.Identity()], lambda: [nn.Identity()], shared=(0,)),
    "empty": Case(list, list, shared=(0,)),
    "reshape": Case(lambda: [ops.Reshape((2, 12))], lambda: [Reshaped(2, 12)], shared=(0,)),
    "make": Case(lambda: [ops.MakeExtraOutput()], lambda: [Make()], shared=(0, 1)),
    "tanh": Case(lambda: [ops.Tanh()], lambda: [nn.Tanh()]),
    "mlp": Case(
        lambda: [ops.LayerNorm(8), ops.Linear(8, 12), ops.GELU(), ops.Linear(12, 8)],
        lambda: [nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)],
    ),
    "ends in reshape": Case(
        lambda: [ops.Linear(8, 8), ops.Reshape((4, 6))], lambda: [nn.Linear(8, 8), Reshaped(4, 6)]
    ),
    "ends in identity": Case(
        lambda: [ops.RMSNorm(8), ops.Identity()], lambda: [nn.RMSNorm(8), nn.Identity()]
    ),
    "ends in tanh": Case(lambda: [ops.Linear(8, 8), ops.Tanh()], lambda: [nn.Linear(8, 8), nn.Tanh()]),
    "ends in relu": Case(
        lambda: [ops.Linear(8, 8, bias=False), ops.ReLU()], lambda: [nn.Linear(8, 8, bias=False), nn.ReLU()]
    ),
    "ends in make": Case(
        lambda: [ops.Linear(8, 8), ops.MakeExtraOutput()], lambda: [nn.Linear(8, 8), Make()], shared=(0, 1)
    ),
    "begins with make": Case(
        lambda: [ops.MakeExtraOutput(), ops.Linear(8, 8)], lambda: [Make(), nn.Linear(8, 8)], shared=(1,)
    ),
    "named and kept": Case(
        lambda: [ops.RMSNorm(8), ops.MakeExtraOutput("r", keep=True), ops.Linear(8, 8), ops.AddExtraInput("r")],
        lambda: [nn.RMSNorm(8), Make("r", keep=True), nn.Linear(8, 8), Add("r")],
    ),
    "extra in": Case(
        lambda: [ops.Linear(8, 8, bias=False), ops.AddExtraInput(), ops.SiLU()],
        lambda: [nn.Linear(8, 8, bias=False), Add(), nn.SiLU()],
        extras=1,
    ),
    "pre-norm": Case(
        lambda: [ops.AddExtraInput(), ops.MakeExtraOutput(), ops.RMSNorm(8)],
        lambda: [Add(), Make(), nn.RMSNorm(8)],
        extras=1,
    ),
    "residual": Case(
        lambda: [
            ops.Residual(ops.RMSNorm(8), ops.Linear(8, 12, bias=False), ops.SwiGLU(), ops.Linear(6, 8, bias=False))
        ],
        lambda: [Add1(nn.RMSNorm(8), nn.Linear(8, 12, bias=False), SwiGLU(), nn.Linear(6, 8, bias=False))],
    ),
    "dropout": Case(
        lambda: [ops.Linear(8, 8), ops.Dropout(0.5), ops.Linear(8, 8)],
        lambda: [nn.Linear(8, 8), ops.Dropout(0.5), nn.Linear(8, 8)],
    ),
    "bare linear": Case(lambda: [ops.Linear(8, 8, bias=False)], lambda: [nn.Linear(8, 8, bias=False)]),
}  # fmt: skip


def cases(*quick: str, names: Iterable[str] = CASES) -> list:
    """All cases as parameters; these belong to the quick tests."""
    return [pytest.param(name, marks=pytest.mark.quick) if name in quick else name for name in names]


#: Default rules and none.
RULES = {"default": fusible.rules.DEFAULT, "none": fusible.rules.NONE}


def tuple_of(outs) -> tuple[Tensor, ...]:
    return outs if isinstance(outs, tuple) else (outs,)


def close(mine: Tensor | None, theirs: Tensor | None, what: str = "") -> None:
    """Equal to float64's accuracy, or both missing."""
    assert (mine is None) == (theirs is None), (
        f"{what}: {mine is not None} for the block, {theirs is not None} for the twin"
    )
    if mine is not None:
        assert mine.shape == theirs.shape, f"{what}: {mine.shape} {theirs.shape}"
        assert mine.dtype == theirs.dtype, f"{what}: {mine.dtype} {theirs.dtype}"
        limit = 1e-10 * max(1.0, theirs.abs().max().item()) if theirs.numel() else 0
        gap = (mine - theirs).abs().max().item() if theirs.numel() else 0
        assert gap <= limit, f"{what}: off by {gap:.3g}"
