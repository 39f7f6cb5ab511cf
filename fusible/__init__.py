"""fusible runs a chain of neural-network operations as one: forward, backward, and to autograd a single node."""

from __future__ import annotations

import importlib
from typing import Any

from fusible import kernels, memory, ops, rules
from fusible.op import Env, Grads, Op, Out, Saved, Spec, reads_for
from fusible.rule import RuleSet, backward, forward, rewrite
from fusible.sequential import Sequential, use_rules

__version__ = "0.1.0"


#: Loaded when they are asked for: the module of each.
_LAZY = {
    "adapter": "adapting",
    "audit": "auditing",
    "chains": "fused",
    "explain": "model_explanation",
    "fuse": "fused",
    "info": "_info",
    "memory_plan": "memory_report",
    "profile": "profiling",
    "unfuse": "fused",
}


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("fusible.testing")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fusible.{_LAZY[name]}"), name)


__all__ = [
    "Env",
    "Grads",
    "Op",
    "Out",
    "RuleSet",
    "Saved",
    "Sequential",
    "Spec",
    "adapter",
    "audit",
    "backward",
    "chains",
    "explain",
    "forward",
    "fuse",
    "info",
    "kernels",
    "memory",
    "memory_plan",
    "ops",
    "profile",
    "reads_for",
    "rewrite",
    "rules",
    "testing",
    "unfuse",
    "use_rules",
]
