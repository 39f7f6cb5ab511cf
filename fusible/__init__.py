"""fusible runs a chain of neural-network operations as one: forward, backward, and to autograd a single node."""

from __future__ import annotations

import importlib
from typing import Any

from fusible import kernels, memory, ops, rules, testing
from fusible._info import info
from fusible.op import Env, Grads, Op, Out, Saved, Spec, reads_for
from fusible.rule import RuleSet, backward, forward, rewrite
from fusible.sequential import Sequential, use_rules

__version__ = "0.1.0"


#: What is loaded when it is asked for, and from where.
_LATER = {
    "adapter": "adapting",
    "audit": "auditing",
    "chains": "fused",
    "fuse": "fused",
    "profile": "profiling",
    "unfuse": "fused",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"fusible.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "forward",
    "fuse",
    "info",
    "kernels",
    "memory",
    "ops",
    "profile",
    "reads_for",
    "rewrite",
    "rules",
    "testing",
    "unfuse",
    "use_rules",
]
