"""Shipped rules, and the sets of them: `DEFAULT`, `NONE`."""

from __future__ import annotations

from fusible.rule import RuleSet

__all__ = ["DEFAULT", "NONE"]

#: No rules: every op runs its own `fwd` and `bwd`.
NONE = RuleSet()
#: What a block uses unless told otherwise.
DEFAULT = RuleSet()
