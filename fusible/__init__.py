"""fusible runs a chain of neural-network operations as one: forward, backward, and to autograd a single node."""

from __future__ import annotations

from typing import Any

from fusible import kernels, memory, ops, rules, testing
from fusible._info import info
from fusible.op import Env, Grads, Op, Out, Saved, Spec, reads_for
from fusible.rule import RuleSet, backward, forward, rewrite
from fusible.sequential import Sequential, use_rules

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What most programs do not use is loaded when it is asked for."""
    if name == "memory_plan":
        from fusible.memory_report import memory_plan

        return memory_plan
    if name == "profile":
        from fusible.profiling import profile

        return profile
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
    "backward",
    "forward",
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
    "use_rules",
]
