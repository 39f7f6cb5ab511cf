"""The one tolerance, by which `fusible.testing` compares what ran fused with the plain formulas.

In float64 a relative 1e-10 of the largest value; in any other dtype no further from the float64 result than twice what
plain torch is in that dtype, or than that result moves if each input moves by a rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fusible.diagnosis import likely_cause

__all__ = ["NEARBY", "allowed", "check_kind", "coarsest_dtype", "compare", "distance", "moved", "require", "same"]

#: How many results nearby are looked at where plain torch was nearer than the fused result.
NEARBY = 4


def require(ok: bool, text: str) -> None:
    """Raises `AssertionError` with this text unless `ok`."""
    if not ok:
        raise AssertionError(text)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same values, NaN counting as equal to itself."""
    return bool(torch.equal(a.nan_to_num(), b.nan_to_num())) if a.is_floating_point() else bool(torch.equal(a, b))


def coarsest_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The floating dtype with the fewest digits; float64 where there is none."""
    floats = {t.dtype for t in tensors if t.is_floating_point()} or {torch.float64}
    return max(floats, key=lambda dtype: torch.finfo(dtype).eps)


def compare(
    what: str,
    fused: Tensor | None,
    plain: Tensor | None,
    exact: Tensor | None,
    coarsest: torch.dtype = torch.float64,
    nearby: Callable[[], list[Tensor | None]] = list,
) -> None:
    """Raises `AssertionError` if `fused` is further from `exact`, the float64 result, than `plain` allows.

    Args:
        coarsest: of the dtypes that were calculated in, which limits a float64 result too.
        nearby: float64 results for inputs within a rounding error of the given ones, asked for only where plain torch,
        by luck, was nearer.
    """
    if fused is None or plain is None or exact is None:
        require(fused is None and plain is None, f"{what} is {_presence(fused)} fused, {_presence(plain)} in reference")
        return
    check_kind(what, fused, plain)
    if not fused.is_floating_point():
        require(bool(torch.equal(fused, plain)), f"{what} differs from reference")
        return
    nan = fused.isnan()
    require(bool(((nan == plain.isnan()) | (nan == exact.isnan())).all()), f"{what} is NaN elsewhere than in reference")
    error, limit = distance(fused, exact), allowed(plain, exact, coarsest)
    if error > limit:
        limit = max([limit, *[2 * distance(near, exact) for near in nearby() if near is not None]])
    if error > limit:
        place, because = _worst(fused, exact), _because(what, fused, exact, limit)
        raise AssertionError(
            f"{what} is off by {error:.3g} at {place}, allowed {limit:.3g} (fused {fused[place].item():.8g}, "
            f"reference {plain[place].item():.8g}, float64 {exact[place].item():.12g}){because}"
        )


def moved(tensor: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Each element moved by up to `noise` of its size, at random; integers as they are."""
    if not (noise and tensor.is_floating_point()):
        return tensor
    step = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return tensor.detach() * (1 + noise * step.to(tensor.device))


def check_kind(what: str, fused: Tensor, plain: Tensor) -> None:
    """Raises `AssertionError` if shape or dtype differ."""
    require(fused.shape == plain.shape, f"{what} has shape {list(fused.shape)} fused, {list(plain.shape)} in reference")
    require(fused.dtype == plain.dtype, f"{what} has dtype {fused.dtype} fused, {plain.dtype} in reference")


def _because(what: str, got: Tensor, exact: Tensor, limit: float) -> str:
    cause = likely_cause(what, got, exact, limit)
    return f"; {cause}" if cause else ""


def _presence(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else "there"


def distance(got: Tensor, exact: Tensor) -> float:
    """The largest absolute difference; places that are not a number in either count for nothing."""
    return _difference(got, exact).max().item() if got.numel() else 0.0


def _difference(got: Tensor, exact: Tensor) -> Tensor:
    difference = (got.double() - exact.double()).abs()
    return torch.where(got.double() == exact.double(), 0.0, difference).nan_to_num(0.0)


def allowed(plain: Tensor, exact: Tensor, coarsest: torch.dtype) -> float:
    """How far from `exact` a result may be: the one tolerance, where plain torch got `plain`."""
    finite = exact.double().abs()
    scale = finite[finite.isfinite()].max().item() if finite.isfinite().any() else 0.0
    dtype = coarsest if plain.dtype == torch.float64 else plain.dtype
    if dtype == torch.float64:
        return 1e-10 * max(scale, 1e-3)
    return 2 * max(distance(plain, exact), torch.finfo(dtype).eps * scale)


def _worst(got: Tensor, exact: Tensor) -> tuple[int, ...]:
    flat = int(_difference(got, exact).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape))
