"""Each kind of block twice, fused and as people write it in plain PyTorch, with the same weights; and its floor.

Letters: n rows (tokens), w width, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusible import ops
from fusible.bench.rows import Row
from fusible.sequential import Sequential

__all__ = ["KINDS", "Kind", "make_block", "make_inputs", "make_output_gradients", "make_twin"]

DROPOUT = 0.1

Gemms: TypeAlias = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Kind:
    """How to make a block, its twin and its input, and what no implementation can do without.

    Attributes:
        block, twin: from the row, with fresh weights; their parameters come in the same order.
        inputs: widths of the inputs, in units of w.
        outputs: how many outputs there are, all [n, w].
        moved: how many [n, w] tensors forward must read and write, and forward+backward.
        linears: (in, out) of each linear layer, whose three products are the floor instead.
        activation: timed with zeros too, since slow arithmetic on tiny numbers shows only with data.
        random: draws random numbers, in another order than the twin does.
    """

    block: Callable[[Row], Sequential]
    twin: Callable[[Row], nn.Module]
    inputs: tuple[int, ...] = (1,)
    outputs: int = 1
    moved: tuple[int, int] = (0, 0)
    linears: Callable[[Row], tuple[tuple[int, int], ...]] = lambda row: ()
    activation: bool = False
    random: bool = False


class AddNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.norm(total), total


class SwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return F.silu(gate) * value


class BiasGELU(nn.Module):
    def __init__(self, width: int, approximate: str) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x + self.bias, approximate=self.approximate)


class DropoutAddNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(residual + F.dropout(x, DROPOUT, self.training))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


def _add_norm(norm: nn.Module) -> Sequential:
    return Sequential(ops.AddExtraInput(), ops.MakeExtraOutput(), norm)


def _bias_gelu(approximate: str) -> Kind:
    return Kind(
        lambda row: Sequential(ops.Bias(row.width), ops.GELU(approximate)),
        lambda row: BiasGELU(row.width, approximate),
        moved=(2, 5),
        activation=True,
    )


def _mlp(row: Row) -> Sequential:
    w, h = row.width, row.hidden
    return Sequential(ops.Residual(ops.RMSNorm(w), ops.Linear(w, h), ops.GELU(), ops.Linear(h, w)))


def _gated_mlp(row: Row) -> Sequential:
    w, h = row.width, row.hidden
    up, down = ops.Linear(w, 2 * h, bias=False), ops.Linear(h, w, bias=False)
    return Sequential(ops.Residual(ops.RMSNorm(w), up, ops.SwiGLU(), down))


KINDS: dict[str, Kind] = {
    "rmsnorm": Kind(lambda row: Sequential(ops.RMSNorm(row.width)), lambda row: nn.RMSNorm(row.width), moved=(2, 5)),
    "add-rmsnorm": Kind(
        lambda row: _add_norm(ops.RMSNorm(row.width)),
        lambda row: AddNorm(nn.RMSNorm(row.width)),
        inputs=(1, 1),
        outputs=2,
        moved=(4, 8),
    ),
    "layernorm": Kind(
        lambda row: Sequential(ops.LayerNorm(row.width)), lambda row: nn.LayerNorm(row.width), moved=(2, 5)
    ),
    "add-layernorm": Kind(
        lambda row: _add_norm(ops.LayerNorm(row.width)),
        lambda row: AddNorm(nn.LayerNorm(row.width)),
        inputs=(1, 1),
        outputs=2,
        moved=(4, 8),
    ),
    "swiglu": Kind(
        lambda row: Sequential(ops.SwiGLU()), lambda row: SwiGLU(), inputs=(2,), moved=(3, 8), activation=True
    ),
    "bias-gelu": _bias_gelu("none"),
    "bias-gelu-tanh": _bias_gelu("tanh"),
    "dropout-add-layernorm": Kind(
        lambda row: Sequential(ops.Dropout(DROPOUT), ops.AddExtraInput(), ops.LayerNorm(row.width)),
        lambda row: DropoutAddNorm(row.width),
        inputs=(1, 1),
        moved=(4, 8),
        random=True,
    ),
    "mlp": Kind(
        _mlp,
        lambda row: MLP(row.width, row.hidden),
        linears=lambda row: ((row.width, row.hidden), (row.hidden, row.width)),
    ),
    "gated-mlp": Kind(
        _gated_mlp,
        lambda row: GatedMLP(row.width, row.hidden),
        linears=lambda row: ((row.width, 2 * row.hidden), (row.hidden, row.width)),
    ),
}


def dtype_of(row: Row) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[row.dtype]


def make_twin(row: Row) -> nn.Module:
    """The plain module, the same weights at each call; norms' gains and biases are not what they start as."""
    torch.manual_seed(0)
    twin = KINDS[row.kind].twin(row)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return twin.to(dtype_of(row))


def make_block(row: Row) -> Sequential:
    """The fused block, with the twin's weights."""
    block = KINDS[row.kind].block(row).to(dtype_of(row))
    with torch.no_grad():
        for mine, theirs in zip(block.parameters(), make_twin(row).parameters(), strict=True):
            assert mine.shape == theirs.shape
            mine.copy_(theirs)
    return block


def make_inputs(row: Row, zeros: bool = False) -> list[Tensor]:
    """Normally distributed leaves [n, k w], the same at each call; or zeros."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(row.tokens, times * row.width) for times in KINDS[row.kind].inputs]
    values = [torch.zeros(shape) if zeros else torch.randn(shape, generator=generator) for shape in shapes]
    return [value.to(dtype_of(row)).requires_grad_() for value in values]


def make_output_gradients(row: Row) -> Sequence[Tensor]:
    """What arrives in backward: one [n, w] for each output."""
    generator = torch.Generator().manual_seed(2)
    shape = (row.tokens, row.width)
    return [torch.randn(shape, generator=generator).to(dtype_of(row)) for _ in range(KINDS[row.kind].outputs)]
