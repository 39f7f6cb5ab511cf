"""Scaled-dot-product attention over a packed row, piece by piece.

b: all leading dimensions in one; t: length; h, g: query heads, and key heads, of which each serves h/g query heads; e:
elements of a head. x `[b, t, (h + 2g) e]` has all query heads, then all key heads, then all value heads. For query i
and key j, where j is one of those that i may see,

    s_ij = scale q_i·k_j;   s_ij = cap tanh(s_ij / cap) with a soft cap;   s_ij += mask_ij
    p_ij = exp(s_ij - l_i),   l_i = log sum_j exp(s_ij),   out_i = sum_j dropout(p_ij) v_j

A row that sees nothing gives 0, and l_i = 0. A *piece* is a run of queries with the run of keys that it may see: the
whole; each sequence of several in one row; with a window, or where scores are held in memory, some queries of each.
Its scores are all that is ever held. On the CPU torch's own kernels run a piece, forward and backward, on strided views
of x; what they lack (a soft cap, dropout, a mask's gradient) is done here by the formula, in float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible import _torch
from fusible.kernels import dropout as dropouts
from fusible.kernels._dtype import to, wide
from fusible.kernels.registry import kernel

#: Scores of a piece that the formula holds at once, and the queries of a piece within a window.
MAX_SCORES = 1 << 20
WINDOW_QUERIES = 128


class How(NamedTuple):
    """What kind of attention: heads, and who sees whom."""

    heads: int
    kv_heads: int
    scale: float
    causal: bool
    window: int | None
    soft_cap: float | None
    dropout: float


class Piece(NamedTuple):
    """Queries `first` to `last`, and the keys `low` to `high` that some of them see."""

    first: int
    last: int
    low: int
    high: int

    def queries(self, t: Tensor) -> Tensor:
        """[b, h, t, ...] -> those of the piece."""
        return t[:, :, self.first : self.last]

    def keys(self, t: Tensor) -> Tensor:
        return t[:, :, self.low : self.high]

    def mask(self, mask: Tensor) -> Tensor:
        """[1 or b, 1 or h, 1 or t, 1 or t] -> the part for these queries and keys."""
        mask = mask[:, :, self.first : self.last] if mask.shape[2] > 1 else mask
        return mask[..., self.low : self.high] if mask.shape[3] > 1 else mask


def heads_of(x: Tensor, how: How) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the query, key and value heads: [b, t, w] -> [b, h, t, e], [b, g, t, e] twice."""
    total = how.heads + 2 * how.kv_heads
    parts = x.unflatten(-1, (total, x.shape[-1] // total)).transpose(1, 2)
    return parts.split((how.heads, how.kv_heads, how.kv_heads), 1)


def pieces(length: int, borders: Sequence[int] | None, how: How, queries: int | None) -> Iterator[Piece]:
    """The pieces of `borders`' sequences, in order; of at most `queries` queries each."""
    borders = (0, length) if borders is None else borders
    reach = length if how.window is None else how.window
    step = max(queries or length, 1)
    if reach < length:
        step = min(step, max(WINDOW_QUERIES, reach))
    for start, stop in pairwise(borders):
        for first in range(start, stop, step):
            last = min(first + step, stop)
            yield Piece(first, last, max(start, first - reach + 1), last if how.causal else min(stop, last + reach - 1))


def visible(piece: Piece, how: How, device: torch.device) -> Tensor | None:
    """[t, t] of the piece: whether the query may see the key; `None` where each sees all."""
    i = torch.arange(piece.first, piece.last, device=device).unsqueeze(1)
    j = torch.arange(piece.low, piece.high, device=device)
    seen = None
    always = torch.compiler.is_compiling()  # a graph for any length must not look at this one
    if how.causal and (always or piece.high > piece.first + 1):
        seen = j <= i
    if how.window is not None and (always or piece.last - 1 - piece.low >= how.window):
        seen = j > i - how.window if seen is None else seen & (j > i - how.window)
    if how.window is not None and not how.causal and (always or piece.high - 1 - piece.first >= how.window):
        seen = j < i + how.window if seen is None else seen & (j < i + how.window)
    return seen


# -- torch's kernels ---------------------------------------------------------------------------------------------------


class _Masks:
    """The mask of each piece as torch's kernel takes it, and whether the kernel shall leave out later keys itself."""

    def __init__(self, how: How, mask: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
        self.how, self.mask, self.dtype, self.device = how, mask, dtype, device
        self.made: dict[tuple[int, int, int], Tensor | None] = {}

    def of(self, piece: Piece) -> tuple[Tensor | None, bool]:
        square = piece.first == piece.low and piece.last == piece.high
        back, ahead = piece.last - piece.low, 0 if self.how.causal else piece.high - piece.first
        near = self.how.window is None or max(back, ahead) <= self.how.window
        causal = self.how.causal and square and near
        own = None if self.mask is None else self._additive(piece.mask(self.mask))
        if causal or (near and not self.how.causal):
            return own, causal
        shape = piece.last - piece.first, piece.high - piece.low, piece.first - piece.low
        if shape not in self.made:
            seen = visible(piece, self.how, self.device)
            self.made[shape] = None if seen is None else self._additive(seen)
        seen = self.made[shape]
        return seen if own is None else own if seen is None else own + seen, False

    def _additive(self, mask: Tensor) -> Tensor:
        if mask.dtype is torch.bool:
            return torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, -torch.inf)
        return to(mask, self.dtype)


def _dense(*tensors: Tensor) -> list[Tensor]:
    """With a last dimension that is dense, which torch's kernels take for granted."""
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


def _flash(x: Tensor, mask: Tensor | None, borders: Sequence[int] | None, how: How) -> tuple[Tensor, Tensor]:
    q, k, v = _dense(*heads_of(x, how))
    masks = _Masks(how, mask, x.dtype, x.device)
    todo = list(pieces(x.shape[1], borders, how, None))
    if len(todo) == 1:
        own, causal = masks.of(todo[0])
        out, lse = _torch.flash_cpu(q, k, v, 0.0, causal, attn_mask=own, scale=how.scale)
        return out.transpose(1, 2), lse
    out = x.new_empty(x.shape[0], x.shape[1], how.heads, q.shape[-1])
    lse = x.new_empty(x.shape[0], how.heads, x.shape[1], dtype=wide(x.dtype))
    for piece in todo:
        own, causal = masks.of(piece)
        parts = piece.queries(q), piece.keys(k), piece.keys(v)
        y, lse_ = _torch.flash_cpu(*parts, 0.0, causal, attn_mask=own, scale=how.scale)
        out[:, piece.first : piece.last] = y.transpose(1, 2)
        lse[:, :, piece.first : piece.last] = lse_
    return out, lse


def _dflash(
    dout: Tensor, x: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, borders: Sequence[int] | None, how: How
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _dense(*heads_of(x, how))
    d, o = _dense(dout.transpose(1, 2), out.transpose(1, 2))
    masks = _Masks(how, mask, x.dtype, x.device)
    todo = list(pieces(x.shape[1], borders, how, None))
    if len(todo) == 1:
        own, causal = masks.of(todo[0])
        grads = _torch.dflash_cpu(d, q, k, v, o, lse, 0.0, causal, attn_mask=own, scale=how.scale)
        return tuple(grad.transpose(1, 2) for grad in grads)
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    for piece in todo:
        own, causal = masks.of(piece)
        takes = piece.queries(d), piece.queries(q), piece.keys(k), piece.keys(v), piece.queries(o), piece.queries(lse)
        a, b, c = _torch.dflash_cpu(*takes, 0.0, causal, attn_mask=own, scale=how.scale)
        piece.queries(dq).copy_(a)
        piece.keys(dk).add_(b)
        piece.keys(dv).add_(c)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def known_to_torch(x: Tensor, mask: Tensor | None, sequence: Tensor | None, how: How) -> Tensor:
    """What torch's own function makes of it, without soft cap or dropout: [b, t, w] -> [b, t, h, e]."""
    q, k, v = heads_of(x, how)
    causal = how.causal and mask is None and sequence is None and how.window is None
    whole = Piece(0, x.shape[1], 0, x.shape[1])
    seen = _sequences(whole, None if causal else visible(whole, how, x.device), sequence)
    if mask is None or seen is None:
        mask = seen if mask is None else mask
    else:
        mask = mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, -torch.inf)
    mask = mask if mask is None or mask.dtype is torch.bool else mask.to(x.dtype)
    grouped = how.heads != how.kv_heads
    out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=how.scale, enable_gqa=grouped)
    return out.transpose(1, 2)


# -- the formula -------------------------------------------------------------------------------------------------------


def _grouped(t: Tensor, groups: int) -> Tensor:
    """[b, h, t, ...] -> [b, g, (h/g) t, ...]: the query heads of a key head, one after the other."""
    return t.unflatten(1, (groups, t.shape[1] // groups)).flatten(2, 3)


def _scores(q: Tensor, k: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """(scores, and before the soft cap, by it): [b, h, t, t] each."""
    flat = _grouped(q, how.kv_heads) @ k.transpose(-1, -2)  # [b, g, (h/g) t, t]
    raw = flat.unflatten(2, (how.heads // how.kv_heads, q.shape[2])).flatten(1, 2) * how.scale
    if how.soft_cap is None:
        return raw, raw
    capped = torch.tanh(raw / how.soft_cap)
    return capped * how.soft_cap, capped


def _masked(scores: Tensor, piece: Piece, mask: Tensor | None, seen: Tensor | None) -> Tensor:
    if mask is not None:
        own = piece.mask(mask)
        scores = scores.masked_fill(~own, -torch.inf) if own.dtype is torch.bool else scores + own
    return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Weights; 0 in a row that sees nothing, as only a mask can make one."""
    if mask is None:
        return torch.softmax(scores, -1)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)


def _queries_at_once(x: Tensor, how: How) -> int:
    return max(16, MAX_SCORES // max(1, x.shape[0] * how.heads * x.shape[1]))


def _sequences(piece: Piece, seen: Tensor | None, sequence: Tensor | None) -> Tensor | None:
    """`seen`, and of the same sequence; `sequence` [t] numbers them."""
    if sequence is None:
        return seen
    same = sequence[piece.first : piece.last].unsqueeze(1) == sequence[piece.low : piece.high]
    return same if seen is None else seen & same


def sequence_numbers(borders: Tensor, length: int) -> Tensor:
    """[n + 1] -> [t]: the number of the sequence that each place belongs to."""
    places = torch.arange(length, device=borders.device, dtype=borders.dtype)
    return torch.searchsorted(borders[1:].contiguous(), places, right=True)


def formula(
    x: Tensor, mask: Tensor | None, sequence: Tensor | None, how: How, drop: Sequence[Tensor] | None = None
) -> Tensor:
    """[b, t, w] -> [b, t, h, e], differentiable; `drop`: the dropout masks of the pieces, drawn here if not given."""
    q, k, v = (to(part, wide(x.dtype)) for part in heads_of(x, how))
    todo: Iterable[Piece] = [Piece(0, x.shape[1], 0, x.shape[1])]
    if how.dropout:
        todo = pieces(x.shape[1], None, how._replace(window=None), _queries_at_once(x, how))
    outs = []
    for number, piece in enumerate(todo):
        scores, _ = _scores(piece.queries(q), piece.keys(k), how)
        seen = _sequences(piece, visible(piece, how, x.device), sequence)
        scores = _masked(scores, piece, mask, seen)
        p = _softmax(scores, mask)
        if how.dropout:
            if drop is None:
                p = dropouts.formula(p, how.dropout)
            else:
                factor = 1 / (1 - how.dropout)
                p = p * dropouts.dropout_mask(p, drop[number], factor) * factor
        out = _grouped(p, how.kv_heads) @ piece.keys(v)
        outs.append(out.unflatten(2, (how.heads // how.kv_heads, piece.last - piece.first)).flatten(1, 2))
    return torch.cat(outs, 2).transpose(1, 2).to(x.dtype) if outs else q.transpose(1, 2).to(x.dtype)


def _plain(x: Tensor, mask: Tensor | None, sequence: Tensor | None, how: How) -> tuple[Tensor, list[Tensor]]:
    """(out, masks of the dropout) by the formula, piece by piece."""
    q, k, v = (to(part, wide(x.dtype)) for part in heads_of(x, how))
    out = x.new_empty(x.shape[0], x.shape[1], how.heads, q.shape[-1])
    drop: list[Tensor] = []
    for piece in pieces(x.shape[1], None, how._replace(window=None), _queries_at_once(x, how)):
        scores, _ = _scores(piece.queries(q), piece.keys(k), how)
        scores = _masked(scores, piece, mask, _sequences(piece, visible(piece, how, x.device), sequence))
        p = _softmax(scores, mask)
        if how.dropout:
            p, own = dropouts.dropout(p, how.dropout)
            drop.append(own)
        y = _grouped(p, how.kv_heads) @ piece.keys(v)
        out[:, piece.first : piece.last] = y.unflatten(2, (how.heads // how.kv_heads, -1)).flatten(1, 2).transpose(1, 2)
    return out, drop


def _dplain(
    dout: Tensor, x: Tensor, mask: Tensor | None, sequence: Tensor | None, how: How, drop: Sequence[Tensor],
    want_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    arithmetic = wide(x.dtype)
    q, k, v = (to(part, arithmetic) for part in heads_of(x, how))
    d = to(dout.transpose(1, 2), arithmetic)
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    dmask = torch.zeros_like(mask, dtype=arithmetic) if want_mask and mask is not None else None
    todo = pieces(x.shape[1], None, how._replace(window=None), _queries_at_once(x, how))
    for number, piece in enumerate(todo):
        scores, capped = _scores(piece.queries(q), piece.keys(k), how)
        scores = _masked(scores, piece, mask, _sequences(piece, visible(piece, how, x.device), sequence))
        p = _softmax(scores, mask)
        own = _grouped(piece.queries(d), how.kv_heads)  # [b, g, (h/g) t, e]
        dp = (own @ piece.keys(v).transpose(-1, -2)).view_as(p)
        dropped = p
        if how.dropout:
            factor = 1 / (1 - how.dropout)
            dp, dropped = (dropouts.ddropout(t, drop[number], factor) for t in (dp, p))
        piece.keys(dv).add_(_grouped(dropped, how.kv_heads).transpose(-1, -2) @ own)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        if dmask is not None:
            part = piece.mask(dmask)
            part.add_(ds.sum_to_size(part.shape))
        if how.soft_cap is not None:
            ds = ds * (1 - capped * capped)
        ds = _grouped(ds, how.kv_heads) * how.scale
        piece.queries(dq).copy_((ds @ piece.keys(k)).view_as(piece.queries(dq)))
        piece.keys(dk).add_(ds.transpose(-1, -2) @ _grouped(piece.queries(q), how.kv_heads))
    return *[to(t, x.dtype).transpose(1, 2) for t in (dq, dk, dv)], dmask  # type: ignore[return-value]


# -- the kernels -------------------------------------------------------------------------------------------------------


def _by_formula(x: Tensor, how: How, want_mask: bool) -> bool:
    return bool(x.device.type != "cpu" or how.soft_cap is not None or how.dropout or want_mask)


def _borders(borders: Tensor | None) -> Sequence[int] | None:
    return None if borders is None or _torch.without_data() else borders.tolist()


@kernel
def attention(
    x: Tensor, mask: Tensor | None, borders: Tensor | None, how: How, want_mask: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """[b, t, w] -> (out [b, t, h, e], l [b, h, t] if torch's kernel ran, what dropout drew if it did).

    mask: [1 or b, 1 or h, 1 or t, 1 or t], bools (true: may see) or added; borders [n + 1]: where sequences of a row
    begin, and where the last one ends.
    """
    if not x.numel():
        return x.new_zeros(*x.shape[:2], how.heads, x.shape[2] // (how.heads + 2 * how.kv_heads)), None, None
    if not _by_formula(x, how, want_mask):
        return *_flash(x, mask, _borders(borders), how), None
    sequence = None if borders is None else sequence_numbers(borders, x.shape[1])
    out, drop = _plain(x, mask, sequence, how)
    return out, None, torch.cat([own.flatten() for own in drop]) if drop else None


@kernel
def dattention(
    dout: Tensor, x: Tensor, out: Tensor, lse: Tensor | None, mask: Tensor | None, borders: Tensor | None, how: How,
    drop: Tensor | None, want_mask: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of the heads, [b, t, h, e] and [b, t, g, e] twice, and of the mask."""
    if not x.numel():
        parts = [part.transpose(1, 2) for part in heads_of(x, how)]
        dmask = torch.zeros_like(mask) if want_mask and mask is not None else None
        return *[torch.zeros_like(part) for part in parts], dmask  # type: ignore[return-value]
    if not _by_formula(x, how, want_mask):
        assert lse is not None
        return *_dflash(dout, x, out, lse, mask, _borders(borders), how), None
    sequence = None if borders is None else sequence_numbers(borders, x.shape[1])
    return _dplain(dout, x, mask, sequence, how, drawn(x, how, drop), want_mask)


def drawn(x: Tensor, how: How, drop: Tensor | None) -> list[Tensor]:
    """What dropout drew for each piece, from what `attention` returned: a mask each, or the two integers of a seed."""
    if drop is None or not x.numel():
        return []
    todo = list(pieces(x.shape[1], None, how._replace(window=None), _queries_at_once(x, how)))
    if drop.dtype is not torch.bool:
        return list(drop.view(-1, 2).unbind())
    shapes = [(x.shape[0], how.heads, piece.last - piece.first, piece.high - piece.low) for piece in todo]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(drop.split(sizes), shapes, strict=True)]
