"""C++ bodies of the kernels, in files of the same names; importing this package registers them.

`fusible.kernels` imports it where the library was built (`python -m fusible build`).
"""

from __future__ import annotations

from fusible.kernels.cpu import (
    activation,
    add_norm,
    cross_entropy,
    dropout,
    gated,
    half,
    linear,
    norm,
    pair,
    residual,
    rotary,
)

__all__ = [
    "activation",
    "add_norm",
    "cross_entropy",
    "dropout",
    "gated",
    "half",
    "linear",
    "norm",
    "pair",
    "residual",
    "rotary",
]
