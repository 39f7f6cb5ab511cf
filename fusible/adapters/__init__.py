"""The adapters that come with fusible, one file per package that they are for. None of them imports that package."""

from __future__ import annotations

from fusible.adapters import decoders, encoders, leaves, timm, torch_nn

__all__ = ["decoders", "encoders", "leaves", "timm", "torch_nn"]
