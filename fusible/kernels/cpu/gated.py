"""Gated activations in one pass; see csrc/gated.cpp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusible.kernels import gated
from fusible.kernels.library import applies, operators

_Arguments = Callable[..., tuple[int, bool, int, float, float, float]]
"""From a kernel's arguments after x to the operators' last ones: number in csrc/gated.h, gate_first, block, options."""


def _product(number: int) -> _Arguments:
    return lambda gate_first=True, interleave=None: (number, gate_first, interleave or 0, 0.0, 0.0, 0.0)


def _geglu(gate_first: bool = True, interleave: int | None = None, approximate: str = "none") -> tuple:
    return 2 if approximate == "tanh" else 1, gate_first, interleave or 0, 0.0, 0.0, 0.0


def _clamped_swiglu(
    gate_first: bool = True,
    interleave: int | None = None,
    limit: float = 7.0,
    alpha: float = 1.702,
    offset: float = 1.0,
) -> tuple:
    return 7, gate_first, interleave or 0, limit, alpha, offset


def _situ_glu(gate_first: bool = True, interleave: int | None = None, beta1: float = 4.0, beta2: float = 25.0) -> tuple:
    return 8, gate_first, interleave or 0, beta1, beta2, 0.0


_ARGUMENTS: dict[str, _Arguments] = {
    "clamped_swiglu": _clamped_swiglu,
    "geglu": _geglu,
    "glu": lambda *_: (6, False, 0, 0.0, 0.0, 0.0),
    "qgeglu": _product(3),
    "reglu": _product(4),
    "situ_glu": _situ_glu,
    "sreglu": _product(5),
    "swiglu": _product(0),
}


def _forward(arguments: _Arguments) -> Callable[..., Tensor]:
    return lambda x, *args, **options: operators.gated(x, *arguments(*args, **options))


def _backward(arguments: _Arguments) -> Callable[..., Tensor]:
    return lambda dy, x, *args, **options: operators.dgated(dy, x, *arguments(*args, **options))


for _act, (_f, _df) in gated.GATED.items():
    if _act != "swiglu":
        _f.backend("cpu", applies)(_forward(_ARGUMENTS[_act]))
        _df.backend("cpu", applies)(_backward(_ARGUMENTS[_act]))


# The most used of them is written out: packing arguments costs a seventh of a small call.
@gated.swiglu.backend("cpu", applies)
def swiglu(x: Tensor, gate_first: bool = True, interleave: int | None = None) -> Tensor:
    return operators.gated(x, 0, gate_first, interleave or 0, 0.0, 0.0, 0.0)


@gated.dswiglu.backend("cpu", applies)
def dswiglu(dy: Tensor, x: Tensor, gate_first: bool = True, interleave: int | None = None) -> Tensor:
    return operators.dgated(dy, x, 0, gate_first, interleave or 0, 0.0, 0.0, 0.0)


@gated.bias_gated.backend("cpu", applies)
def bias_gated(x: Tensor, bias: Tensor, act: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    return operators.bias_gated(x, bias, *_ARGUMENTS[act](*arguments))


@gated.bias_gated_.backend("cpu", applies)
def bias_gated_(x: Tensor, bias: Tensor, act: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    if not x.is_contiguous():
        return gated.bias_gated_.body(x, bias, act, *arguments)
    return operators.bias_gated_(x, bias, *_ARGUMENTS[act](*arguments)), x


@gated.dgated_dbias.backend("cpu", applies)
def dgated_dbias(
    dy: Tensor, x: Tensor, act: str, dtype: torch.dtype | None = None, *arguments: Any
) -> tuple[Tensor, Tensor]:
    return operators.dgated_dbias(dy, x, *_ARGUMENTS[act](*arguments), dtype or x.dtype)


@gated.dgated_recompute.backend("cpu", applies)
def dgated_recompute(dy: Tensor, x: Tensor, act: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    return operators.dgated_recompute(dy, x, *_ARGUMENTS[act](*arguments))


@gated.dgated_dbias_recompute.backend("cpu", applies)
def dgated_dbias_recompute(
    dy: Tensor, x: Tensor, act: str, dtype: torch.dtype | None = None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return operators.dgated_dbias_recompute(dy, x, *_ARGUMENTS[act](*arguments), dtype or x.dtype)
