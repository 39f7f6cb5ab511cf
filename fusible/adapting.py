"""The registry of adapters: what says how the modules of a class are fused.

An adapter is found by the module's exact class, given as the class itself or as its dotted name, so that nothing is
imported for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

__all__ = ["Adapter", "Declined", "adapter", "build", "find", "plain_class"]


class Declined(Exception):
    """A module cannot be fused; the text is the reason, in the user's words."""


class Adapter(NamedTuple):
    """How to fuse the modules of one class."""

    build: Callable[..., Any]
    reads: frozenset[str] | None
    needs: tuple[str, int] | None
    alone: bool
    code: Any  # the forward of a class that was given as such, when it was given


_ADAPTERS: dict[type | str, Adapter] = {}

#: Set in the namespace of each class that `fuse` makes: the class that it stands for.
PLAIN = "_fusible_plain"


def adapter(
    *kinds: type | str,
    reads: Iterable[str] | None = None,
    needs: tuple[str, int] | None = None,
    alone: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers how modules of exactly these classes are fused by `fusible.fuse`. A later one replaces an earlier.

    The function is called as `build(module, chain)` and returns

    - `chain(...)`, if the module's `forward(x)` is that chain of its children. Chains of other modules may then name
      this module, and take it in;
    - or a function, which stands for the module's `forward`, with the same arguments, and calls one or more chains.

    `chain(*modules)` makes a chain of the module's own children, of `fusible.ops` and of activation functions.
    `chain.decline(reason)` leaves the module as it is.

    Args:
        kinds: classes, or their dotted names, `"package.file.Class"`; `"*.Class"` for a class of that name anywhere.
        reads: names that the class's `forward` uses, of attributes and globals. If they differ, its code is not the
            code that the adapter was written for, and the module is left as it is.
        needs: a package and its lowest major version, `("transformers", 5)`.
        alone: whether such a module is worth fusing where no chain takes it in.

    Raises `TypeError` if a kind is neither a class of modules nor a name.
    """
    for kind in kinds:
        if not (isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, torch.nn.Module))):
            raise TypeError(f"@fusible.adapter takes classes of torch.nn.Module or their dotted names, got {kind!r}")
    names = None if reads is None else frozenset(reads)

    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        for kind in kinds:
            code = kind.forward if isinstance(kind, type) else None  # type: ignore[attr-defined]
            _ADAPTERS[kind] = Adapter(build, names, needs, alone, code)
        return build

    return register


def plain_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of a module, or the one that it had before it was fused."""
    kind = type(module)
    return kind.__dict__.get(PLAIN, kind)


def find(kind: type) -> Adapter | None:
    """The adapter of exactly this class."""
    from fusible import adapters  # noqa: F401 - registers those that are shipped

    names = (kind, f"{kind.__module__}.{kind.__qualname__}", f"*.{kind.__name__}")
    return next((_ADAPTERS[name] for name in names if name in _ADAPTERS), None)


def build(module: torch.nn.Module, chains: Any) -> Any:
    """What the module's adapter returns. Raises `Declined`."""
    kind = plain_class(module)
    found = find(kind)
    if found is None:
        raise Declined(f"{kind.__name__} is not an op of fusible and has no adapter")
    _check_code(kind, found)
    return found.build(module, chains)


def _check_code(kind: type, found: Adapter) -> None:
    """Raises `Declined` if the class is not what its adapter was written for."""
    if found.needs is not None:
        package, lowest = found.needs
        version = sys.modules[package].__version__ if package in sys.modules else "0"
        if int(version.partition(".")[0]) < lowest:
            raise Declined(f"its adapter is for {package} {lowest} or newer, this is {version}")
    if found.code is not None and kind.forward is not found.code:  # type: ignore[attr-defined]
        raise Declined(f"the forward of {kind.__name__} is another one now than when its adapter was registered")
    if found.reads is not None:
        function = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
        names = frozenset(function.__code__.co_names)
        if names != found.reads:
            odd = ", ".join(sorted(names ^ found.reads))
            raise Declined(f"the forward of {kind.__name__} is not the one that its adapter knows; it differs in {odd}")
