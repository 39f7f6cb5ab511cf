"""`Rotary`, and its tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusible import _torch, kernels
from fusible.kernels.rotary import formula
from fusible.op import Absent, Grads, Op, Out, Saved, Spec, reads_for
from fusible.ops._checks import arithmetic, shown

__all__ = ["Rotary"]

#: Tables that are kept, and the length from which a table for given positions is made for those alone.
MAX_TABLES = 64
LONGEST = 1 << 17

Frequencies = tuple[list[float], float]
_tables: dict[tuple, Tensor] = {}


class Rotary(Op):
    """Rotates the first `heads` heads of a packed stream by angles that grow with the position: `[..., t, w]`.

    x has whole heads of `head_dim` elements side by side, as a linear layer makes them for `Attention`: give `heads`
    the number of query and key heads. With theta_i the frequency of pair i of a head, and p the position,

        a' = a cos(p theta_i) - b sin(p theta_i),   b' = b cos(p theta_i) + a sin(p theta_i)

    where (a, b) are elements (i, r/2 + i) of a head, or with `interleaved` (2i, 2i + 1), of its first r = `rotary_dim`
    elements (all of them if not given), and `theta_i = base^(-2i/r)`. The position is the index along x's second last
    dimension or, with `positions="name"`, comes from the block's shared input of that name: integers [t] or one for
    each row, [..., t], none negative.

    `scaling` stretches the frequencies for long contexts; a dict as in a model's configuration:

    - `{"rope_type": "linear", "factor": f}`: `theta / f`.
    - `{"rope_type": "dynamic", "factor": f, "original_max_position_embeddings": n}`: the base grows with the length
      once that is above n (NTK-aware). Not with `positions`.
    - `{"rope_type": "yarn", "factor": f, "original_max_position_embeddings": n}` and `beta_fast=32`, `beta_slow=1`,
      `attention_factor`, `mscale`, `mscale_all_dim`, `truncate=True`.
    - `{"rope_type": "llama3", "factor": f, "low_freq_factor": l, "high_freq_factor": h,
      "original_max_position_embeddings": n}`.

    Angles are calculated in float64 where the device has it; x is rotated in float32 (float64 for float64 x), and y has
    x's dtype and shape. Raises `ValueError` on a width that is not whole heads or too small, on positions of another
    shape or dtype, and on negative ones.

    Source: Su et al., "RoFormer", 2021; Peng et al., "YaRN", 2023.
    """

    num_extra_inputs = 1
    lengthwise = ("positions",)
    aliases = False
    grad_aliases = False
    fixed = ("head_dim", "heads", "base", "interleaved", "rotary_dim", "scaling")

    class Saved(Saved):
        length: int = reads_for("x")
        positions: Tensor | None = reads_for("x")

    def __init__(
        self,
        head_dim: int,
        heads: int,
        *,
        base: float = 10000.0,
        interleaved: bool = False,
        rotary_dim: int | None = None,
        scaling: Mapping[str, Any] | None = None,
        positions: str | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.heads, self.base, self.interleaved = head_dim, heads, float(base), interleaved
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.scaling = None if scaling is None else dict(scaling)
        self.positions = positions
        if head_dim < 1 or heads < 1:
            raise ValueError(f"head_dim and heads must be positive, got {head_dim} and {heads}")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= head_dim:
            name = "head_dim" if rotary_dim is None else "rotary_dim"
            raise ValueError(
                f"{name} must be even, since pairs are rotated, and at most head_dim={head_dim}, got {self.rotary_dim}"
            )
        if scaling is not None:
            _check_scaling(self.scaling, positions)

    def reference(self, x: Tensor, positions: Tensor | None) -> Tensor:
        table = self._table(x.shape[-2], positions, x.device, x.dtype)
        return formula(x, table, self.heads, self.head_dim, self.interleaved)

    def fwd(self, x: Tensor, positions: Tensor | None) -> Out:
        y = kernels.rotate(x, self.table(x, positions), self.heads, self.head_dim, self.interleaved)
        return Out(y, saved=Rotary.Saved(x.shape[-2], positions))

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        table = self.table(dy, saved[1])
        return Grads(kernels.rotate(dy, table, self.heads, self.head_dim, self.interleaved, True), None)

    def infer(self, x: Spec, positions: Spec | None, *, autocast: torch.dtype | None = None) -> Spec:
        arithmetic(x)
        if len(x.shape) < 2:
            raise ValueError(f"x must have a dimension of positions before its last, [..., t, width] {shown(x)}")
        if x.width % self.head_dim or x.width < self.heads * self.head_dim:
            raise ValueError(
                f"x's last dimension must be whole heads of {self.head_dim}, at least {self.heads} of them, but is "
                f"{x.width} {shown(x)}"
            )
        if positions is not None:
            check_positions(x, positions)
        return x

    def extra_input_names(self) -> tuple[Any, ...]:
        return (self.positions or Absent,)

    def extra_repr(self) -> str:
        shown_ = [str(self.head_dim), str(self.heads)]
        shown_ += [f"base={self.base:g}"] if self.base != 10000 else []
        shown_ += ["interleaved=True"] if self.interleaved else []
        shown_ += [f"rotary_dim={self.rotary_dim}"] if self.rotary_dim != self.head_dim else []
        shown_ += [f"scaling={self.scaling}"] if self.scaling else []
        shown_ += [f"positions={self.positions!r}"] if self.positions else []
        return ", ".join(shown_)

    # -- tables ------------------------------------------------------------------------------------------------------

    def table(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """The table for x [..., t, w], [t, r] or [..., t, r], from those that are kept."""
        length = x.shape[-2]
        if _torch.without_data():
            return self._table(length, positions, x.device, x.dtype)
        if positions is None:
            return self._kept(length, x.device, x.dtype)[:length]
        if x.device.type != "cpu":
            return self._table(length, positions, x.device, x.dtype)
        lowest, highest = (int(p) for p in torch.aminmax(positions)) if positions.numel() else (0, 0)
        if lowest < 0:
            raise ValueError(f"Rotary: positions must not be negative, got {lowest}")
        if highest >= LONGEST:
            return self._table(length, positions, x.device, x.dtype)
        return self._kept(highest + 1, x.device, x.dtype)[positions]

    def _kept(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """A table of at least so many positions, shared by all ops of equal parameters."""
        dynamic = self.scaling is not None and _kind(self.scaling) == "dynamic"
        scaling = tuple(sorted(self.scaling.items())) if self.scaling else None
        key = self.base, self.rotary_dim, scaling, device, _wide(dtype), length if dynamic else None
        found = _tables.get(key)
        if found is None or len(found) < length:
            rows = length if dynamic else 1 << (max(length, 1) - 1).bit_length()
            with torch.inference_mode(False):
                found = self._table(rows, None, device, dtype)
            while len(_tables) >= MAX_TABLES:
                _tables.pop(next(iter(_tables)), None)
            _tables[key] = found
        return found

    def _table(self, length: int, positions: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
        exact = torch.float32 if device.type == "mps" else torch.float64
        frequencies, factor = _frequencies(self.rotary_dim, self.base, self.scaling, length)
        at = torch.arange(length, device=device) if positions is None else positions
        angles = at.to(exact).unsqueeze(-1) * torch.tensor(frequencies, dtype=exact, device=device)
        return (torch.cat((angles.cos(), angles.sin()), -1) * factor).to(_wide(dtype))


def check_positions(x: Spec, positions: Spec) -> None:
    """Raises `ValueError` unless there is one integer for each place of x [..., t, w], or [t]."""
    if positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"positions must have dtype int64 or int32, got {positions.dtype}; convert them with long()")
    if positions.shape not in (x.shape[:-1], x.shape[-2:-1]):
        raise ValueError(
            f"positions must have shape {[x.shape[-2]]} or {list(x.shape[:-1])}, one for each place of x, but have "
            f"{list(positions.shape)} {shown(x)}"
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


# -- frequencies -------------------------------------------------------------------------------------------------------

_NEEDS = {
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
_MAY = {"yarn": {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}}


def _kind(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type", scaling.get("type")))


def _check_scaling(scaling: Any, positions: str | None) -> None:
    kind = _kind(scaling)
    if kind not in _NEEDS:
        raise ValueError(f"scaling: rope_type must be one of {', '.join(_NEEDS)}, got {kind!r}")
    given = set(scaling) - {"rope_type", "type"}
    missing = sorted(_NEEDS[kind] - given)
    if missing:
        raise ValueError(f"scaling: rope_type {kind!r} needs {', '.join(missing)}, got {scaling}")
    unknown = sorted(given - _NEEDS[kind] - _MAY.get(kind, set()))
    if unknown:
        raise ValueError(f"scaling: rope_type {kind!r} has no option {unknown[0]!r}; take it out")
    if scaling["factor"] < 1:
        raise ValueError(f"scaling: factor must be at least 1, got {scaling['factor']}")
    if kind == "dynamic" and positions is not None:
        raise ValueError("scaling: rope_type 'dynamic' depends on the length of x; leave positions out")


def _frequencies(size: int, base: float, scaling: Any, length: int) -> Frequencies:
    """The angle per position of each of size/2 pairs, and the factor of their cosines and sines."""
    kind = _kind(scaling) if scaling else None
    if kind == "dynamic":
        known = scaling["original_max_position_embeddings"]
        growth = scaling["factor"] * max(length, known) / known - (scaling["factor"] - 1)
        return _plain(size, base * growth ** (size / (size - 2)) if size > 2 else base), 1.0
    plain = _plain(size, base)
    if kind is None:
        return plain, 1.0
    return {"linear": _linear, "yarn": _yarn, "llama3": _llama3}[kind](plain, base, scaling)


def _plain(size: int, base: float) -> list[float]:
    return [base ** (-2 * i / size) for i in range(size // 2)]


def _linear(plain: list[float], base: float, scaling: Any) -> Frequencies:
    return [theta / scaling["factor"] for theta in plain], 1.0


def _yarn(plain: list[float], base: float, scaling: Any) -> Frequencies:
    """Pairs that turn often over the known length stay, those that turn seldom are stretched, with a ramp between."""
    size, factor, known = 2 * len(plain), scaling["factor"], scaling["original_max_position_embeddings"]

    def place(turns: float) -> float:
        """Which pair turns so many times."""
        return size * math.log(known / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = place(scaling.get("beta_fast") or 32), place(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last += 0.001 if first == last else 0
    stretched = [min(max((i - first) / (last - first), 0.0), 1.0) for i in range(len(plain))]
    frequencies = [theta * (1 - s) + theta / factor * s for theta, s in zip(plain, stretched, strict=True)]
    return frequencies, _yarn_factor(scaling)


def _yarn_factor(scaling: Any) -> float:
    def growth(by: float) -> float:
        return 0.1 * by * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return growth(scaling["mscale"]) / growth(scaling["mscale_all_dim"])
    return growth(1)


def _llama3(plain: list[float], base: float, scaling: Any) -> Frequencies:
    """Long waves are stretched, short ones stay, and between the two limits the two are mixed."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    mix: Callable[[float], float] = lambda turns: min(max((turns - low) / (high - low), 0.0), 1.0)  # noqa: E731
    turns = [scaling["original_max_position_embeddings"] * theta / (2 * math.pi) for theta in plain]
    pairs = zip(plain, map(mix, turns), strict=True)
    return [(1 - m) * theta / factor + m * theta for theta, m in pairs], 1.0
