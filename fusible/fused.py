"""`fuse` and `unfuse`: stock models made faster and leaner in place, one instance at a time, and back.

A fused module gets a subclass of its own class, made once per class, whose `forward` runs chains over views of the
module's own children. Nothing else of it changes: no parameter, no name, no child, no other instance. The chains are
kept beside the module's attributes, are dropped by copies and pickles, and are made again when they are needed.

Why the class and not an attribute `forward` of the instance: tools look there (hooks of sharding and of offloading
replace it), copies of a bound method reach back to the original, and `unfuse` could not tell whose it is. Why not new
modules in the place of the old: names, keys and everybody's references would change.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fusible import _torch
from fusible.adapting import PLAIN, Declined, build, find, plain_class
from fusible.fuse_report import Report
from fusible.fuser import PLAIN_TENSORS
from fusible.fusing import Chain, Chains

__all__ = ["chains", "fuse", "unfuse"]

#: The attribute of a fused module that holds its chains.
STATE = "_fusible"

_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


class Fusion:
    """One module's forward, made of chains, and what it was made from."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.forward: Any = None
        self.reason = ""
        chains = Chains(module)
        try:
            self.forward = self._made(module, chains)
        except Declined as reason:
            self.reason = str(reason)
            chains.look_at(module)
        self.notes = chains.notes
        self.chains = chains.chains
        self.covered = chains.covered
        self.watch = chains.watch
        self.watch.close()
        kinds = {plain_class(inner) for inner in (module, *chains.opened)}
        self.code = [(kind, kind.forward) for kind in kinds]
        self.parameters = chains.parameters
        self.names = [tuple(parameters) for parameters in self.parameters]
        self.constants = chains.constants
        self.plain = self._parameters_are_plain()

    @staticmethod
    def _made(module: torch.nn.Module, chains: Chains) -> Any:
        if "forward" in module.__dict__:
            raise Declined(f"the forward of this {plain_class(module).__name__} was replaced")
        return build(module, chains)

    def _parameters_are_plain(self) -> bool:
        for parameters in self.parameters:
            for parameter in parameters.values():
                if parameter is not None and type(parameter) not in PLAIN_TENSORS:
                    return False
        return True

    def current(self, module: torch.nn.Module) -> bool:
        """Whether the module still is what its chains were made from."""
        if self.module is not module or not self.watch.unchanged():  # a replica shares its original's attributes
            return False
        for kind, code in self.code:
            if kind.forward is not code:
                return False
        for attributes, name, value in self.constants:
            if attributes.get(name) != value:
                return False
        if [tuple(parameters) for parameters in self.parameters] != self.names:
            return False
        return self._parameters_are_plain() is self.plain


def _fusion(module: torch.nn.Module) -> Fusion:
    found = module.__dict__.get(STATE)
    if found is None or not found.current(module):
        found = module.__dict__[STATE] = Fusion(module)
    return found


def _fused_class(plain: type) -> type:
    """The subclass that a fused module of this class gets."""
    found = _classes.get(plain)
    if found is None:
        found = _classes[plain] = _make_class(plain)
    return found


def _make_class(plain: Any) -> type:
    @functools.wraps(plain.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _torch.seen_through():
            run = _fusion(self).forward
            if run is not None:
                return run(*args, **kwargs)
        return plain.forward(self, *args, **kwargs)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        """Pickles as the class that it was, so that reading it needs no fusible."""
        return _reduced(self, plain, super(made, self).__reduce_ex__(1))  # later protocols want the class that it has

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        """A copy is fused too, with chains of its own."""
        new = made.__new__(made)
        memo[id(self)] = new
        state = self.__reduce_ex__(4)[2]
        new.__setstate__(copy.deepcopy(state, memo))
        return new

    namespace: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "__reduce_ex__": reduce_ex,
        "forward": forward,
        PLAIN: plain,
    }
    if "__deepcopy__" not in dir(plain):
        namespace["__deepcopy__"] = deepcopy
    made = type(plain)(plain.__name__, (plain,), namespace)
    return made


def _reduced(module: Any, plain: type, reduced: Any) -> Any:
    make, args, state, *rest = reduced
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name != STATE}
    return make, tuple(plain if arg is type(module) else arg for arg in args), state, *rest


def fuse(model: torch.nn.Module, *, strict: bool = False) -> Report:
    """Makes a model's modules run fused, in place, where fusible knows how.

    Parameters, state dict, names, children and hooks stay what they are, and so do optimizers made before. A module
    with hooks inside, a replaced `forward`, quantized, sharded or parametrized weights is left as it is, with the
    reason in the report; if one of these comes later, the next call runs the module's own `forward`. A copy of a fused
    module is fused, a pickle is the plain module. Fusing again fuses what is not fused yet.

    Args:
        model: any module; what is inside it is found by class, see `fusible.adapter`.
        strict: raise instead if a module that has an adapter cannot be fused, or if nothing can.

    Returns the report, to be printed.

    Raises:
        TypeError: model is not a module.
        ValueError: `strict`, with all reasons; the model is as it was.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"fusible.fuse takes a torch.nn.Module, got {model!r} ({type(model).__name__})")
    report = Report(plain_class(model).__name__)
    planned = list(_plan(model, "", report, set()))
    report.close(model)
    if strict and (report.declined or not (planned or report.fused)):
        raise ValueError(f"{report.model} was left as it is: {report.reasons()}")
    for module, fusion in planned:
        module.__dict__[STATE] = fusion
        module.__class__ = _fused_class(type(module))
    for _, fusion in planned:
        fusion.watch.close()  # the classes that it looks at are the new ones
    return report


def _plan(
    module: torch.nn.Module, path: str, report: Report, seen: set[int]
) -> Iterator[tuple[torch.nn.Module, Fusion]]:
    """The modules to fuse, outermost first, with their chains."""
    if id(module) in seen:
        return
    seen.add(id(module))
    kind = plain_class(module)
    if PLAIN in type(module).__dict__:
        fusion = _fusion(module)
        report.add(path, kind, fusion, again=True)
        seen |= set(fusion.covered)
    elif (found := find(kind)) is not None and found.alone:
        fusion = Fusion(module)
        report.add(path, kind, fusion)
        if fusion.forward is not None:
            seen |= set(fusion.covered)
            yield module, fusion
    for name, child in module._modules.items():
        if child is not None:
            yield from _plan(child, f"{path}.{name}" if path else name, report, seen)


def unfuse(model: torch.nn.Module) -> torch.nn.Module:
    """Makes every fused module inside what it was before `fuse`, and returns the model.

    Raises `RuntimeError` if a fused module got another class on top (by sharding, by a parametrization): take that off
    first. Nothing is changed then.
    """
    fused = []
    for path, module in model.named_modules():
        kind = type(module)
        if PLAIN in kind.__dict__:
            fused.append(module)
        elif PLAIN in dir(kind):
            raise RuntimeError(
                f"{path or 'the model'} is a {kind.__name__} made of a fused {kind.__mro__[-1].__name__}; undo what "
                f"changed its class before unfuse"
            )
    for module in fused:
        module.__class__ = plain_class(module)
        module.__dict__.pop(STATE, None)
    return model


def chains(module: torch.nn.Module) -> list[Chain]:
    """The chains that a fused module runs, to be asked `explain(x)`; none if it runs its own forward now."""
    if PLAIN not in type(module).__dict__:
        raise ValueError(f"{type(module).__name__} is not fused; fusible.fuse(model) prints what is, and why not")
    return _fusion(module).chains
