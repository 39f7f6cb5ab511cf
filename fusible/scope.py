"""Which rules are used where: `use_rules`, and rules under a memory budget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from fusible.rule import Rule, RuleSet
from fusible.rules import DEFAULT

__all__ = ["in_use", "observed_blocks", "own_rules", "use_rules"]


class _InUse(threading.local):
    rules: RuleSet | None = None
    observe: Callable[[Any, tuple, dict[str, Any]], None] | None = None


in_use = _InUse()


@contextmanager
def use_rules(rules: Iterable[Rule]) -> Iterator[RuleSet]:
    """Makes every block of this thread use these rules, over its own `rules=`; the innermost wins.

    A backward uses the rules of its forward, wherever it runs. A block's `memory_budget` holds with these rules too.
    `fusible.rules.NONE` turns fusion off, and recomputation.
    """
    new = rules if isinstance(rules, RuleSet) else RuleSet(rules)
    before, in_use.rules = in_use.rules, new
    try:
        yield new
    finally:
        in_use.rules = before


@contextmanager
def observed_blocks(observe: Callable[[Any, tuple, dict[str, Any]], None]) -> Iterator[None]:
    """Calls `observe(block, args, kwargs)` for each block that this thread calls on tensors without data."""
    before, in_use.observe = in_use.observe, observe
    try:
        yield
    finally:
        in_use.observe = before


def own_rules(rules: Iterable[Rule] | None, memory_budget: float | int | None) -> RuleSet | None:
    """Rules with the budget under which they are used; without one, they keep what they have.

    Raises `TypeError` and `ValueError` on a budget that is neither a fraction nor bytes.
    """
    if memory_budget is None:
        return rules if rules is None or isinstance(rules, RuleSet) else RuleSet(rules)
    from fusible.budget import checked, within

    return within(DEFAULT if rules is None else RuleSet(rules), checked(memory_budget))
