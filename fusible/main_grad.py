"""Gradients of parameters that are added to `parameter.main_grad` instead of `parameter.grad`; docs/main-grad.md.

The protocol is that of Megatron-LM and TransformerEngine, for every parameter instead of linear layers' weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible import _torch

__all__ = ["Buffer", "accumulate", "find_buffers", "raise_double_backward"]

Targets = Sequence[tuple[int, int, str]]
"""For each parameter: its place among the gradients, its place among inputs and parameters, and its name."""


class Buffer(NamedTuple):
    """Where a parameter's gradient goes, added or, with `overwrite`, instead of what is there."""

    parameter: Any
    tensor: Tensor
    overwrite: bool


def find_buffers(targets: Targets, flat: Sequence[Any]) -> list[Buffer | None]:
    """Each parameter's buffer; `None` where the gradient goes its usual way.

    So it does where this backward returns gradients (`torch.autograd.grad`) or has none for the parameter, and for a
    bias without `main_grad`. Raises `RuntimeError`, naming the parameter, if its buffer is missing or does not fit,
    before anything is written.
    """
    return [_buffer(flat[place][0], name) for _, place, name in targets]


def _buffer(parameter: Any, name: str) -> Buffer | None:
    if not parameter.is_leaf or not _torch.will_accumulate(parameter):
        return None
    getter = getattr(parameter, "get_main_grad", None)
    tensor = getter() if getter else getattr(parameter, "main_grad", None)
    if tensor is None and name.startswith("bias "):
        return None
    what = f"{name} is to be accumulated into main_grad"
    if not isinstance(tensor, Tensor):
        raise RuntimeError(
            f"{what}, but the parameter has {'none' if tensor is None else repr(tensor)}; before backward give it a "
            f"buffer, as in parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)"
        )
    if tensor.shape != parameter.shape or tensor.device != parameter.device or not tensor.is_floating_point():
        raise RuntimeError(
            f"{what}, which must be a floating tensor of shape {list(parameter.shape)} on {parameter.device}, got "
            f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}; give it a buffer like the parameter"
        )
    if parameter._backward_hooks:
        raise RuntimeError(
            f"{what}, but a tensor hook (register_hook) on the parameter would not see that gradient; use "
            f"register_post_accumulate_grad_hook, or accumulate_into_main_grad=False"
        )
    return Buffer(parameter, tensor, bool(getattr(parameter, "overwrite_main_grad", False)))


def accumulate(
    targets: Targets, buffers: Sequence[Buffer | None], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Adds what a step has not added itself, and puts zeros in the place of each gradient, so that hooks fire."""
    result = list(grads)
    for (at, _, _), buffer in zip(targets, buffers, strict=True):
        grad = result[at]
        if grad is None or buffer is None:
            continue
        if buffer.overwrite:
            buffer.tensor.copy_(grad)
        elif grad is not buffer.tensor:
            buffer.tensor.add_(grad)
        if hasattr(buffer.parameter, "grad_added_to_main_grad"):
            buffer.parameter.grad_added_to_main_grad = True
        result[at] = torch.zeros_like(buffer.parameter)
    return tuple(result)


def raise_double_backward(targets: Targets) -> None:
    """Raises `RuntimeError`: gradients that can be differentiated cannot be added to a buffer."""
    raise RuntimeError(
        f"{targets[0][2]} is to be accumulated into main_grad, but backward runs with create_graph=True, whose "
        f"gradients must stay differentiable; use torch.autograd.grad, or accumulate_into_main_grad=False"
    )
