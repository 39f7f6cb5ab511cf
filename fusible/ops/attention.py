"""`Attention`."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fusible import _torch, kernels
from fusible.kernels.attention import How, drawn, formula, known_to_torch, sequence_numbers
from fusible.op import Absent, Env, Grads, Op, Out, Saved, Spec
from fusible.ops._checks import arithmetic, shown

__all__ = ["Attention"]


class Attention(Op):
    """Scaled-dot-product attention of a packed stream: `[..., t, (h + 2g) e] -> [..., t, h e]`.

    x has `heads` query heads of e elements side by side, then `kv_heads` key heads, then as many value heads (h and g;
    g is h if not given), as one linear layer makes them. Each key and value head serves h/g query heads, neighbours.
    For query i and key j

        s_ij = scale q_i·k_j + mask_ij,   y_i = sum_j dropout(softmax_j(s_ij)) v_j

    over those j that i may see: all; with `causal` j <= i; with `window=w` also j > i - w and, if not causal,
    j < i + w; those that `mask` leaves; those of the same sequence. A query that may see nothing gives 0.

    Args:
        scale: e^(-1/2) if not given.
        soft_cap: scores become `soft_cap tanh(scores / soft_cap)` before the mask is added.
        dropout: of the weights, in training, 0 <= dropout < 1; drawn from torch's generator as by `Dropout`.
        mask: name of the block's shared input that holds a mask, of any shape that broadcasts to [..., h, t, t]: bools,
            true where the query (second last) may see the key (last), or floats that are added to the scores, and get a
            gradient if they require one. For a padding mask `[b, t]` pass `mask[:, None, None, :]`.
        cu_seqlens: name of the block's shared input that says where sequences of different lengths begin that lie one
            after the other along t, and where the last one ends: int32 or int64 [n + 1], from 0 up to t. There is no
            attention from one to another, and no work for it. All leading dimensions share the borders.
        head_dim: e, if the width is to be checked against it.

    On the CPU torch's own kernels run, forward and backward, on views of x, one call for each sequence (with a window,
    for each run of queries); a soft cap, dropout and a mask that requires grad are calculated by the formula, some
    queries at a time. Neither holds t x t scores. y has x's dtype, also under autocast; sums are in float32 at least,
    and torch's kernel rounds the weights of 16-bit x to x's dtype. Kept: x, y, and a number for each row and head.

    Raises `ValueError` on a width that is not whole heads, masks that do not broadcast, and borders that are none.

    Source: Vaswani et al., "Attention is all you need", 2017; Ainslie et al., "GQA", 2023.
    """

    num_extra_inputs = 2
    lengthwise = ("mask", "cu_seqlens")
    aliases = False
    grad_aliases = False
    fixed = ("heads", "kv_heads", "causal", "window", "dropout", "scale", "soft_cap")

    class Saved(Saved):
        x: Tensor
        out: Tensor
        lse: Tensor | None
        mask: Tensor | None
        cu_seqlens: Tensor | None
        drop: Tensor | None

    def __init__(
        self,
        heads: int,
        kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        causal: bool = False,
        window: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        soft_cap: float | None = None,
        mask: str | None = None,
        cu_seqlens: str | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, heads if kv_heads is None else kv_heads, head_dim
        self.causal, self.window, self.dropout, self.scale, self.soft_cap = causal, window, dropout, scale, soft_cap
        self.mask, self.cu_seqlens = mask, cu_seqlens
        if heads < 1 or self.kv_heads < 1 or heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, both positive, got {heads} and {self.kv_heads}")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, the place itself, got {window}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
        if soft_cap is not None and soft_cap <= 0:
            raise ValueError(f"soft_cap must be positive, got {soft_cap}; leave it out for none")

    def reference(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        how, flat = self._how(x), _flat(x)
        sequence = None if cu_seqlens is None else sequence_numbers(cu_seqlens, x.shape[-2])
        transformed = _torch.seen_through() and not torch.compiler.is_compiling()
        known = self.soft_cap is None and not how.dropout and not transformed and x.numel()
        with torch.autocast(x.device.type, enabled=False) if _torch.any_autocast() else nullcontext():
            out = (known_to_torch if known else formula)(flat, _four(mask, x), sequence, how)
        return self._whole(out, x)

    def fwd(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, *, env: Env) -> Out:
        if cu_seqlens is not None:
            _check_borders(cu_seqlens, x.shape[-2])
        out, lse, drop = kernels.attention(_flat(x), _four(mask, x), cu_seqlens, self._how(x), env.needs.mask)
        y = self._whole(out, x)
        return Out(y, saved=Attention.Saved(x, y, lse, mask, cu_seqlens, drop))

    def bwd(self, saved: Saved, dy: Tensor, *, env: Env) -> Grads:
        dq, dk, dv, dmask = self.bwd_heads(saved, dy, env.needs.mask)
        dx = kernels.pack(dq, dk, dv).view(saved[0].shape) if env.needs.x else None
        return Grads(dx, dmask, None)

    def bwd_heads(self, saved: Saved, dy: Tensor, want_mask: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients of the query, key and value heads, [b, t, heads, e] each, and of the mask."""
        x, y, lse, mask, cu_seqlens, drop = saved
        how, flat, four = self._how(x), _flat(x), _four(mask, x)
        d, out = (_flat(t).unflatten(-1, (self.heads, y.shape[-1] // self.heads)) for t in (dy, y))
        dq, dk, dv, dmask = kernels.dattention(d, flat, out, lse, four, cu_seqlens, how, drop, want_mask)
        return dq, dk, dv, None if dmask is None else _unbroadcast(dmask, mask, x)

    def replay(self, saved: Saved, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        how, flat = self._how(x), _flat(x)
        sequence = None if cu_seqlens is None else sequence_numbers(cu_seqlens, x.shape[-2])
        drop = None if saved is None or saved.drop is None else drawn(flat, how, saved.drop)
        with torch.autocast(x.device.type, enabled=False):
            out = formula(flat, _four(mask, x), sequence, how, drop)
        return self._whole(out, x)

    def infer(
        self, x: Spec, mask: Spec | None, cu_seqlens: Spec | None, *, autocast: torch.dtype | None = None
    ) -> Spec:
        arithmetic(x)
        if len(x.shape) < 2:
            raise ValueError(f"x must have a dimension of length before its last, [..., t, width] {shown(x)}")
        total = self.heads + 2 * self.kv_heads
        size = x.width // total
        if x.width != total * (self.head_dim or size) or not size:
            each = "whole heads" if self.head_dim is None else f"heads of {self.head_dim}"
            raise ValueError(
                f"x's last dimension must be {total} {each}, {self.heads} of queries and {self.kv_heads} each of keys "
                f"and values, but is {x.width} {shown(x)}"
            )
        if mask is not None:
            _check_mask(mask, (*x.shape[:-2], self.heads, x.shape[-2], x.shape[-2]), x)
        if cu_seqlens is not None and (
            cu_seqlens.dtype not in (torch.int32, torch.int64) or len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] < 2
        ):
            raise ValueError(
                f"cu_seqlens must be int32 or int64 of shape [n + 1] for n sequences, got {cu_seqlens.dtype} of shape "
                f"{list(cu_seqlens.shape)}"
            )
        return x._replace(shape=(*x.shape[:-1], self.heads * size))

    def extra_input_names(self) -> tuple[Any, ...]:
        return (self.mask or Absent, self.cu_seqlens or Absent)

    def extra_repr(self) -> str:
        options = {"head_dim": None, "causal": False, "window": None, "dropout": 0.0, "scale": None, "soft_cap": None,
                   "mask": None, "cu_seqlens": None}  # fmt: skip
        changed = [f"{name}={getattr(self, name)!r}" for name, usual in options.items() if getattr(self, name) != usual]
        return ", ".join([f"{self.heads}, {self.kv_heads}", *changed])

    @staticmethod
    def _whole(out: Tensor, x: Tensor) -> Tensor:
        """[b, t, h, e] -> [..., t, h e]."""
        return out.reshape(*x.shape[:-1], out.shape[-2] * out.shape[-1])

    def _how(self, x: Tensor) -> How:
        size = x.shape[-1] // (self.heads + 2 * self.kv_heads)
        scale = 1 / math.sqrt(size) if self.scale is None else self.scale
        drop = self.dropout if self.training else 0.0
        return How(self.heads, self.kv_heads, scale, self.causal, self.window, self.soft_cap, drop)


def _flat(x: Tensor) -> Tensor:
    """[..., t, w] -> [b, t, w]."""
    return x.flatten(0, -3) if x.dim() > 3 else x if x.dim() == 3 else x.unsqueeze(0)


def _four(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """A mask with exactly four dimensions, [1 or b, 1 or h, 1 or t, 1 or t]."""
    if mask is None or mask.dim() == 4:
        return mask if mask is None or x.dim() == 3 else mask.expand(*x.shape[:-2], *mask.shape[1:]).flatten(0, -4)
    if mask.dim() < 4:
        return mask[(None,) * (4 - mask.dim())]
    return mask.expand(*x.shape[:-2], *mask.shape[-3:]).flatten(0, -4)


def _unbroadcast(dmask: Tensor, mask: Tensor, x: Tensor) -> Tensor:
    """The gradient of `_four`, in memory of its own."""
    if mask.dim() < 4 or x.dim() == 3:
        return dmask.view(mask.shape)
    return dmask.unflatten(0, x.shape[:-2]).sum_to_size(mask.shape)


def _check_mask(mask: Spec, full: tuple[int, ...], x: Spec) -> None:
    if mask.dtype is not torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(f"mask must be bools or floats, got {mask.dtype}; convert it, with bool()")
    last = full[len(full) - len(mask.shape) :] if len(mask.shape) <= len(full) else ()
    fits = len(last) == len(mask.shape) and all(m in (1, f) for m, f in zip(mask.shape, last, strict=True))
    if not fits:
        raise ValueError(
            f"mask must broadcast to {list(full)}, [..., heads, t, t], but has shape {list(mask.shape)} {shown(x)}"
        )


def _check_borders(borders: Tensor, length: int) -> None:
    if _torch.without_data():
        return
    at = borders.tolist()
    if at[0] != 0 or at[-1] != length or any(a > b for a, b in pairwise(at)):
        raise ValueError(
            f"Attention: cu_seqlens must begin with 0, not fall, and end with the length {length}, got {at}"
        )
