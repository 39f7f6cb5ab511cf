"""`Residual`."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.op import Op

__all__ = ["Residual"]


class Residual(torch.nn.Sequential):
    """`y = x + f(x)`, where f is the chain of the modules given. A `torch.nn.Sequential`: same constructor, same keys.

    In a `fusible.Sequential` its ops join the surrounding chain; on its own it calls them one after the other. Raises
    `ValueError` if f changes the shape.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for module in self:
            if isinstance(module, Op) and (module.present_inputs() or module.num_extra_outputs):
                raise TypeError(
                    f"Residual: {type(module).__name__} has extra inputs or outputs, which only a fusible.Sequential "
                    f"can route; put the Residual into one"
                )
            y = module(y)
        if y.shape != x.shape:
            raise ValueError(f"Residual: f(x) must have x's shape {list(x.shape)} but has {list(y.shape)}")
        return x + y
