"""A norm's output that whoever reads it need not keep: it is computed again in backward.

Attention runs as it is, so its projections would keep their input, the norm's output, although the norm keeps all that
it takes to compute it again. Saved-tensor hooks around the call put a recipe there instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusible import _torch
from fusible.op import Op, has_kernels

__all__ = ["forgetful"]


class _Kept:
    """A saved tensor that stays, with the version that it had: hooks take that check out of autograd's hands.

    Saved-tensor hooks around ours (checkpointing, offloading) get it first, as they would without ours.
    """

    def __init__(self, tensor: Tensor, around: tuple[Any, Any] | None) -> None:
        self.unpack = None if around is None else around[1]
        self.version = None if around or tensor.is_inference() else tensor._version
        detached = tensor.detach()  # the tensor itself may hold the node that holds this
        self.packed = detached if around is None else around[0](tensor)

    def get(self) -> Tensor:
        if self.unpack is not None:
            return self.unpack(self.packed)
        _check(self.packed, self.version)
        return self.packed


class _Recipe:
    """A norm with its input and parameters as they were; gives its output again, once for all that read it."""

    def __init__(self, op: Op, x: Tensor, output: Tensor, around: tuple[Any, Any] | None) -> None:
        self.op = op
        self.device = x.device.type
        params = [owner[name] for owner, name in op.sources()]
        self.kept = [None if tensor is None else _Kept(tensor, around) for tensor in (x, *params)]
        self.memory = _torch.storage_id(output)
        self.version = output._version
        self.output: Tensor | None = None
        self.readers = self.left = 0

    def made(self, tensor: Tensor) -> bool:
        """Whether this is the norm's output, or a view of it, and nobody has written to it."""
        return (
            tensor.layout is torch.strided
            and _torch.storage_id(tensor) == self.memory
            and tensor._version == self.version
        )

    def get(self) -> Tensor:
        if self.output is None:
            self.output, self.left = self._compute(), self.readers
        output = self.output
        self.left -= 1
        if self.left <= 0:
            self.output = None
        return output

    def _compute(self) -> Tensor:
        x, *params = (None if kept is None else kept.get() for kept in self.kept)
        with torch.no_grad(), torch.autocast(self.device, enabled=False):
            if has_kernels(type(self.op)):
                return self.op.fwd(x, *params).values[0].contiguous()  # type: ignore[arg-type]
            return self.op.reference(x, *params).contiguous()  # type: ignore[arg-type]


class _View:
    """The output, or a view of it, to be taken from a recipe."""

    def __init__(self, recipe: _Recipe, tensor: Tensor) -> None:
        self.recipe = recipe
        self.place = tensor.shape, tensor.stride(), tensor.storage_offset()
        recipe.readers += 1

    def get(self) -> Tensor:
        return self.recipe.get().as_strided(*self.place)


def _check(tensor: Tensor, version: int | None) -> None:
    if version is not None and tensor._version != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )


def forgetful(op: Op, x: Tensor, normal: Tensor, call: Callable[[Tensor], Any]) -> Any:
    """`call(normal)`, which reads the output of the norm `op` for x, without keeping it."""
    plain = normal.requires_grad and normal.is_contiguous() and normal.storage_offset() == 0
    if not plain or not torch.is_grad_enabled() or not _torch.saved_tensor_hooks_allowed():
        return call(normal)
    around = _torch.top_saved_tensor_hooks()
    recipe = _Recipe(op, x, normal, around)

    def pack(tensor: Tensor) -> Any:
        return _View(recipe, tensor) if recipe.made(tensor) else _Kept(tensor, around)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.get()):
        return call(normal)
