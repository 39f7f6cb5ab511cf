"""Tables that are read by index: `Embedding`, `PositionEmbedding`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible import kernels
from fusible.op import Absent, Env, Grads, Op, Out, Saved, Spec, reads_for
from fusible.ops._checks import shown, trailing
from fusible.ops.rotary import check_positions

__all__ = ["Embedding", "PositionEmbedding"]

INTEGERS = (torch.int64, torch.int32)


class Embedding(Op, torch.nn.Embedding):
    """`y = weight[x]`: integers [...] -> [..., d]. `torch.nn.Embedding`, as an op; x is int64 or int32.

    y has the weight's dtype. The row `padding_idx` gets no gradient. To tie it to an output layer, give both one
    parameter: `head.weight = embedding.weight`; the gradients add up. `max_norm`, `sparse` and `scale_grad_by_freq` run
    as `torch.nn.Embedding` does them, outside of the chain. Sums of gradients are in float32 at least.

    Raises `ValueError` on x of another dtype, `IndexError` on an index out of range.
    """

    lengthwise = ("x",)
    aliases = False
    grad_aliases = False
    fixed = ("padding_idx",)

    class Saved(Saved):
        x: Tensor = reads_for("weight")

    def reference(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(x, weight, self.padding_idx)

    def fwd(self, x: Tensor, weight: Tensor) -> Out:
        return Out(rows_of(weight, x, "Embedding", "x"), saved=Embedding.Saved(x))

    def bwd(self, saved: Saved, dy: Tensor, weight: None = reads_for()) -> Grads:
        return Grads(None, weight=kernels.dembedding(dy, saved[0], self.num_embeddings, self.padding_idx))

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        if x.dtype not in INTEGERS:
            raise ValueError(f"x must have dtype int64 or int32, got {x.dtype}; pass the numbers of tokens")
        return Spec((*x.shape, self.embedding_dim), self.weight.dtype, x.device)

    def declines(self) -> str | None:
        options = {"max_norm": self.max_norm is not None, "sparse": self.sparse,
                   "scale_grad_by_freq": self.scale_grad_by_freq}  # fmt: skip
        given = [name for name, there in options.items() if there]
        return f"Embedding with {given[0]} runs as torch.nn.Embedding does it" if given else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.Embedding.forward(self, x) if self.declines() else Op.forward(self, x)


class PositionEmbedding(Op):
    """Learned positions, `y = x + weight[p]`: [..., t, d] -> [..., t, d]; the weight is [max_length, d].

    The position p is the index along x's second last dimension or, with `positions="name"`, comes from the block's
    shared input of that name: integers [t], or [..., t], one for each place of x. The weight starts normal with a
    standard deviation of 0.02. y has x's dtype; sums of gradients are in float32 at least.

    Raises `ValueError` on another width, more than `max_length` places, or positions of another shape or dtype, and
    `IndexError` on a position out of range.

    Source: Gehring et al., "Convolutional Sequence to Sequence Learning", 2017.
    """

    num_extra_inputs = 1
    lengthwise = ("positions",)
    aliases = False
    grad_aliases = False
    fixed = ("max_length",)

    class Saved(Saved):
        positions: Tensor | None = reads_for("weight")
        length: int = reads_for("weight")

    def __init__(
        self, max_length: int, dim: int, *, positions: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.max_length, self.positions = max_length, positions
        self.weight = torch.nn.Parameter(torch.empty(max_length, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight, std=0.02)

    def reference(self, x: Tensor, positions: Tensor | None, weight: Tensor) -> Tensor:
        rows = weight[: x.shape[-2]] if positions is None else F.embedding(positions, weight)
        return x + rows.to(x.dtype)

    def fwd(self, x: Tensor, positions: Tensor | None, weight: Tensor) -> Out:
        length = x.shape[-2]
        rows = weight[:length] if positions is None else rows_of(weight, positions, "PositionEmbedding", "positions")
        return Out(kernels.add_rows(x, rows), saved=PositionEmbedding.Saved(positions, length))

    def bwd(self, saved: Saved, dy: Tensor, weight: None = reads_for(), *, env: Env) -> Grads:
        dweight = None
        if env.needs.weight:
            positions = saved[0]
            if positions is None:
                dweight = kernels.dadd_rows(dy, self.max_length)
            else:
                dweight = kernels.dembedding(dy, positions.expand(dy.shape[:-1]), self.max_length)
        return Grads(dy, None, weight=dweight)

    def infer(self, x: Spec, positions: Spec | None, *, autocast: torch.dtype | None = None) -> Spec:
        trailing(x, self.weight.shape[1:], "weight")
        if len(x.shape) < 2:
            raise ValueError(f"x must have a dimension of positions before its last, [..., t, width] {shown(x)}")
        if positions is not None:
            check_positions(x, positions)
        elif x.shape[-2] > self.max_length:
            raise ValueError(f"there are {self.max_length} positions but x has {x.shape[-2]} places {shown(x)}")
        return x

    def extra_input_names(self) -> tuple[Any, ...]:
        return (self.positions or Absent,)

    def extra_repr(self) -> str:
        where = f", positions={self.positions!r}" if self.positions else ""
        return f"{self.max_length}, {self.weight.shape[1]}{where}"


def rows_of(table: Tensor, indices: Tensor, op: str, name: str) -> Tensor:
    """`table[indices]`, with the error in the user's words."""
    try:
        return kernels.embedding(table, indices)
    except IndexError:
        low, high = (int(i) for i in torch.aminmax(indices))
        wrong = low if low < 0 else high
        raise IndexError(f"{op}: {name} must be from 0 to {len(table) - 1}, got {wrong}") from None
