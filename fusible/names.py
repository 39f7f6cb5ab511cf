"""`Names`: what `env.needs` and `env.keeps` are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["Names"]


class Names:
    """A set of dotted names that is asked by attribute: `needs.x`, `needs.linear.weight`.

    Asking for a name that does not exist raises `AttributeError`, so that a typing error is not a silent "no".
    """

    def __init__(self, names: frozenset[str], known: frozenset[str]) -> None:
        self._names = names
        for name in known:
            first, _, rest = name.partition(".")
            if not rest:
                self.__dict__[first] = name in names
            elif first not in self.__dict__:
                self.__dict__[first] = Names(_below(first, names), _below(first, known))

    def __getattr__(self, name: str) -> Any:
        there = sorted(key for key in self.__dict__ if not key.startswith("_"))
        raise AttributeError(f"no {name!r} here; there are {', '.join(there) or 'no names'}")

    def __bool__(self) -> bool:
        return bool(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __repr__(self) -> str:
        return f"Names({', '.join(self)})"


def _below(first: str, names: frozenset[str]) -> frozenset[str]:
    return frozenset(name.removeprefix(first + ".") for name in names if name.startswith(first + "."))
