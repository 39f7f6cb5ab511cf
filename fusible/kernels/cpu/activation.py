"""Pointwise activations and what is before them in one pass; see csrc/activation.cpp."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusible.kernels import activation
from fusible.kernels.library import applies, operators
from fusible.kernels.registry import Kernel

#: The numbers of csrc/activation.h.
_NUMBERS = {"gelu": 0, "qgelu": 2, "relu": 3, "srelu": 4, "silu": 5, "sigmoid": 6, "tanh": 7}


#: Up to so many elements torch's own forward operators are faster, by some 0.6 us a call (docs/measured.md).
_SMALL = {"gelu_tanh": 1 << 9, "relu": 1 << 18, "sigmoid": 1 << 12, "silu": 1 << 12, "tanh": 1 << 9}


def _number(act: str, approximate: str) -> int:
    return 1 if approximate == "tanh" and act == "gelu" else _NUMBERS[act]


def _forward(kernel: Kernel, act: str) -> Callable[..., Tensor]:
    number = _NUMBERS[act]

    def body(x: Tensor) -> Tensor:
        return kernel.body(x) if x.numel() <= _SMALL.get(act, -1) else operators.act(x, number)

    return body


def _in_place(kernel: Kernel, act: str) -> Callable[..., Tensor]:
    number = _NUMBERS[act]

    def body(x: Tensor) -> Tensor:
        if x.numel() <= _SMALL.get(act, -1) or not x.is_contiguous():
            return kernel.body(x)
        operators.act_(x, number)
        return x

    return body


def _backward(number: int) -> Callable[..., Tensor]:
    return lambda dy, record: operators.dact(dy, record, number)


for _act, (_f, _f_, _df) in activation.ACTIVATIONS.items():
    if _act != "gelu":
        _f.backend("cpu", applies)(_forward(_f, _act))
        _f_.backend("cpu", applies)(_in_place(_f_, _act))
        _df.backend("cpu", applies)(_backward(_NUMBERS[_act]))


def _small_gelu(x: Tensor, approximate: str) -> bool:
    return approximate == "tanh" and x.numel() <= _SMALL.get("gelu_tanh", -1)


@activation.gelu.backend("cpu", applies)
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if _small_gelu(x, approximate):
        return activation.gelu.body(x, approximate)
    return operators.act(x, _number("gelu", approximate))


@activation.gelu_.backend("cpu", applies)
def gelu_(x: Tensor, approximate: str = "none") -> Tensor:
    if _small_gelu(x, approximate) or not x.is_contiguous():
        return activation.gelu_.body(x, approximate)
    operators.act_(x, _number("gelu", approximate))
    return x


@activation.dgelu.backend("cpu", applies)
def dgelu(dy: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    return operators.dact(dy, x, _number("gelu", approximate))


@activation.bias_act.backend("cpu", applies)
def bias_act(
    x: Tensor, bias: Tensor, act: str, approximate: str = "none", keep: bool = True
) -> tuple[Tensor, Tensor | None]:
    number = _number(act, approximate)
    return operators.bias_act(x, bias, number) if keep else (operators.bias_act_forget(x, bias, number), None)


@activation.bias_act_.backend("cpu", applies)
def bias_act_(
    x: Tensor, bias: Tensor, act: str, approximate: str = "none", keep: bool = True
) -> tuple[Tensor, Tensor | None]:
    if not x.is_contiguous():
        return activation.bias_act_.body(x, bias, act, approximate, keep)
    number = _number(act, approximate)
    if keep:
        return operators.bias_act_(x, bias, number), x
    operators.bias_act_forget_(x, bias, number)
    return x, None


@activation.dact_dbias.backend("cpu", applies)
def dact_dbias(
    dy: Tensor, record: Tensor, act: str, approximate: str = "none", dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    return operators.dact_dbias(dy, record, _number(act, approximate), dtype or record.dtype)


@activation.dact_recompute.backend("cpu", applies)
def dact_recompute(dy: Tensor, x: Tensor, act: str, approximate: str = "none") -> tuple[Tensor, Tensor]:
    return operators.dact_recompute(dy, x, _number(act, approximate))


@activation.dact_dbias_recompute.backend("cpu", applies)
def dact_dbias_recompute(
    dy: Tensor, x: Tensor, act: str, approximate: str = "none", dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return operators.dact_dbias_recompute(dy, x, _number(act, approximate), dtype or x.dtype)
