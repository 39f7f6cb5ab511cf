"""The shared library of C++ kernels: loaded once, on demand, if it was built (`python -m fusible build`).

`FUSIBLE_KERNELS` in the environment names another file than the one beside the package.
"""

from __future__ import annotations

import functools
import os
import pathlib
from typing import Any

import torch

from fusible import _torch

__all__ = ["FLOATS", "LIBRARY", "applies", "built", "load", "operators", "why_not"]

_OTHER = os.environ.get("FUSIBLE_KERNELS")
LIBRARY = pathlib.Path(_OTHER) if _OTHER else pathlib.Path(__file__).parents[1] / "_kernels.so"
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def built() -> bool:
    """Whether there is a library to load."""
    return LIBRARY.exists()


@functools.cache
def _error() -> str | None:
    if not built():
        return f"FUSIBLE_KERNELS={_OTHER}: no such file" if _OTHER else "not built; run: python -m fusible build"
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return f"does not load ({error}); run: python -m fusible build"
    return "built from other sources; run: python -m fusible build" if _stale() else None


def _stale() -> bool:
    """Whether the sources beside the package are not those of the library, whose operators may then be others."""
    from fusible.build import SOURCES, digest

    if not SOURCES.exists():
        return False
    try:
        return torch.ops.fusible.sources() != digest()
    except AttributeError:  # older than the question
        return True


def load() -> bool:
    """Whether the kernels are there; loads them on the first call."""
    return _error() is None


def why_not() -> str | None:
    """Why the kernels are not there, or `None`."""
    return _error()


def applies(device: str, dtype: torch.dtype, width: int) -> bool:
    """The condition of most kernels: a float dtype on the CPU, any width."""
    return device == "cpu" and dtype in FLOATS and load()


class _Operators:
    """The library's operators by name, each looked up at its first call: `operators.act(x, 5)`."""

    def __getattr__(self, name: str) -> Any:
        operator = _torch.bare(getattr(torch.ops.fusible, name).default)
        setattr(self, name, operator)
        return operator


operators = _Operators()
