"""The chains that adapters build of a module's own children, and what is watched so that nothing of it goes stale."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible import _torch
from fusible.adapting import Declined, build, plain_class
from fusible.borrowing import gate_of, pair, transposed
from fusible.chain import Split, Watch, resolve
from fusible.forgetting import forgetful
from fusible.fuser import PLAIN_TENSORS
from fusible.op import Op, view
from fusible.ops import GELU, TWINS, ReLU, Residual, SiLU
from fusible.rules import DEFAULT
from fusible.scope import in_use
from fusible.sequential import Sequential, _opens, _State

__all__ = ["Borrow", "Chain", "Chains", "Choice"]


class Choice(NamedTuple):
    """A norm that rounds in its own way: the op that does the same in float32, and one that does it in any dtype."""

    float32: Op
    other: Op


class Borrow(NamedTuple):
    """Ops, and the modules whose parameters they read."""

    ops: tuple[Op, ...]
    modules: tuple[torch.nn.Module, ...]


class Runs:
    """The chains in a container that stays what it is: what `fusible.Sequential` would run in its place."""

    def __init__(self, container: torch.nn.Module) -> None:
        self.layout = resolve(container, (), _opens)
        self.state = _State(self.layout, type(container).__name__)

    def __call__(self, x: Tensor) -> Any:
        """y; `None` if a tensor's type asks for the plain path."""
        rules = DEFAULT if in_use.rules is None else in_use.rules
        outs = self.state(x, (), {}, rules)
        return None if outs is None else outs[0]


class Group(NamedTuple):
    """What stands in a residual branch, as it was given."""

    modules: tuple[Any, ...]


class Chain:
    """A chain of a module's children: `y = chain(x, *extra_inputs)`, one autograd node.

    Its blocks are no children of the module and appear in no state dict.
    """

    def __init__(self, parts: list[Any], covered: list[torch.nn.Module]) -> None:
        self.parts = parts
        self.covered = covered
        self.block = _block(parts, 0)
        self.exact = _block(parts, 1) if _chooses(parts) else self.block

    def __call__(self, x: Tensor, *extras: Tensor) -> Any:
        return (self.block if x.dtype is torch.float32 else self.exact)(x, *extras)

    def then(self, x: Tensor, call: Callable[[Tensor], Any]) -> Any:
        """`call(chain(x))`, for a chain of one norm, without its output being kept by the modules that read it there.

        They would keep it for the gradients of their weights; in backward it is computed again, once.
        """
        normal = self(x)
        (part,) = self.parts
        op = part if isinstance(part, Op) else part[x.dtype is not torch.float32]
        return forgetful(op, x, normal, call)

    def explain(self, x: Tensor, *extras: Tensor) -> Any:
        """The plan for this kind of call; see `fusible.Sequential.explain`."""
        return (self.block if x.dtype is torch.float32 else self.exact).explain(x, *extras)


class Branch(NamedTuple):
    """What is inside a `Residual`."""

    parts: list[Any]


def _chooses(parts: Iterable[Any]) -> bool:
    return any(isinstance(part, Choice) or (isinstance(part, Branch) and _chooses(part.parts)) for part in parts)


def _picked(parts: Iterable[Any], which: int) -> list[torch.nn.Module]:
    picked: list[torch.nn.Module] = []
    for part in parts:
        if isinstance(part, Branch):
            picked.append(Residual(*_picked(part.parts, which)))
        else:
            picked.append(part[which] if isinstance(part, Choice) else part)
    return picked


def _block(parts: list[Any], which: int) -> Sequential:
    block = Sequential(*_picked(parts, which))
    for part in block._resolve().parts:
        if isinstance(part, Split):
            raise Declined(f"{type(part.module).__name__}: {part.reason}")
    return block


#: Activations that are functions.
FUNCTIONS: dict[Any, Callable[[], Op]] = {
    F.relu: ReLU,
    torch.relu: ReLU,
    F.gelu: GELU,
    F.silu: SiLU,
}


class Chains:
    """Makes the chains of one module, and keeps what they were made from."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.kind = plain_class(module)
        self.watch = Watch()
        self.watch.container(module, outermost=True)
        self.covered: dict[int, torch.nn.Module] = {}
        self.opened: list[torch.nn.Module] = []
        self.parameters: list[dict[str, Any]] = [module._parameters] if module._parameters else []
        self.chains: list[Chain] = []
        self.notes: list[str] = []
        self.constants: list[tuple[dict[str, Any], str, Any]] = []
        self._parents = {
            id(child): parent for parent in module.modules() for child in parent._modules.values() if child is not None
        }

    # -- for adapters ------------------------------------------------------------------------------------------------

    def __call__(self, *modules: Any) -> Chain:
        """A chain of these modules, ops and functions. Raises `Declined` if one of them cannot be part of it."""
        covered: list[torch.nn.Module] = []
        chain = Chain([part for module in modules for part in self._parts(module, covered)], covered)
        self._cover(covered)
        self.chains.append(chain)
        return chain

    def attempt(self, *modules: Any) -> Chain | None:
        """`chain(*modules)`, or `None` with the reason noted for the report."""
        try:
            return self(*modules)
        except Declined as reason:
            self.notes.append(str(reason))
            for module in _named(modules):
                self.look_at(module)
            return None

    @staticmethod
    def residual(*modules: Any) -> Group:
        """`x + f(x)`, for a chain; like `ops.Residual`, and takes whatever a chain takes."""
        return Group(modules)

    def runs(self) -> Runs:
        """The runs of ops in the module itself, a container; modules between them run as they are."""
        runs = Runs(self.module)
        if runs.layout.positional or runs.layout.outputs:
            raise Declined("it has extra inputs or outputs, which only a fusible.Sequential serves")
        self.watch = runs.layout.watch
        for part in runs.layout.parts:
            if not isinstance(part, Split):
                self.parameters += {id(owner): owner for node in part.nodes for owner, _ in node.op.sources()}.values()
        split = {id(part.module) for part in runs.layout.parts if isinstance(part, Split)}
        self.covered = {id(module): module for module in self.watch.modules if id(module) not in split}
        return runs

    def gated(self, gate: torch.nn.Module, act: Any, up: torch.nn.Module) -> Borrow:
        """`act(gate(x)) * up(x)`, for a chain: two linear layers in one pass over x, and one gated activation.

        Both are `torch.nn.Linear` without biases; `act` is an activation module or function.
        """
        for linear in (gate, up):
            if type(linear) is not torch.nn.Linear:
                kind = f"{type(linear).__module__}.{type(linear).__qualname__}"
                raise Declined(f"{self._path(linear)} is a {kind}, not a torch.nn.Linear")
            if linear.bias is not None:
                raise Declined(f"{self._path(linear)} has a bias, which the pair of projections lacks")
        gated = self.gate(act)
        return Borrow((pair(gate, up), *gated.ops), (gate, *gated.modules, up))

    def gate(self, act: Any) -> Borrow:
        """`act(a) * b` on the two halves `a` and `b` of the last dimension, for a chain."""
        covered: list[torch.nn.Module] = []
        acts = list(self._parts(act, covered))
        gated = gate_of(acts[0]) if len(acts) == 1 else None
        if gated is None:
            raise Declined(f"there is no gated activation for {_name(act)}")
        return Borrow((gated,), tuple(covered))

    def transposed(self, linear: torch.nn.Module) -> Borrow:
        """A linear layer whose `weight` is stored as [in, out], for a chain."""
        return Borrow(tuple(transposed(linear)), (linear,))

    def fixed(self, module: torch.nn.Module, *names: str) -> None:
        """Attributes of the module that the chains were made by; if one changes, they are made again."""
        self.constants += [(module.__dict__, name, module.__dict__.get(name)) for name in names]

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, for calls that the chains do not cover."""
        return self.kind.forward(self.module, *args, **kwargs)

    @staticmethod
    def decline(reason: str) -> Any:
        """Leaves the module as it is, for this reason."""
        raise Declined(reason)

    # -- inside ------------------------------------------------------------------------------------------------------

    def look_at(self, module: torch.nn.Module) -> None:
        """Makes the fused model look again when anything changes in this module."""
        for inner in module.modules():
            self.watch.containers.append((inner._modules, list(inner._modules.values())))
            self._watch(inner)
            if inner._parameters:
                self.parameters.append(inner._parameters)

    def _watch(self, module: torch.nn.Module) -> None:
        if any(module.__dict__[name] for name in _torch.MODULE_HOOKS):
            self.watch.hooked.append(module)
        else:
            self.watch.module(module)

    def _parts(self, module: Any, covered: list[torch.nn.Module]) -> Iterator[Any]:
        if isinstance(module, Choice):
            yield module
            return
        if isinstance(module, Borrow):
            for owner in module.modules:
                self._check(owner)
            covered += module.modules
            yield from module.ops
            return
        if isinstance(module, Group) or type(module) is Residual:
            inside = module.modules if isinstance(module, Group) else module._modules.values()
            yield Branch([part for child in inside for part in self._parts(child, covered)])
            return
        if not isinstance(module, torch.nn.Module):
            function = FUNCTIONS.get(module) if callable(module) else None
            if function is None:
                raise Declined(f"{_name(module)} is not a function that fusible knows; a torch.nn module may be")
            yield function()
            return
        if isinstance(module, Op) and id(module) not in self._parents:
            yield module
            return
        self._check(module)
        covered.append(module)
        yield from self._own_parts(module, covered)

    def _own_parts(self, module: torch.nn.Module, covered: list[torch.nn.Module]) -> Iterator[Any]:
        kind = plain_class(module)
        if isinstance(module, Op):
            yield module
        elif kind is torch.nn.Dropout and module.__dict__["p"] == 0:
            self.fixed(module, "p")  # left out, so that rules see what is on both sides of it as neighbours
        elif kind in TWINS:
            yield view(TWINS[kind], module)
        elif kind is torch.nn.Sequential:
            for child in module._modules.values():
                yield from self._parts(child, covered)
        else:
            chains = Chains(module)
            inner = build(module, chains)
            if not isinstance(inner, Chain):
                raise Declined(f"{kind.__name__} is more than one chain")
            self.constants += chains.constants
            covered += inner.covered
            yield from inner.parts

    def _check(self, module: torch.nn.Module) -> None:
        name = plain_class(module).__name__
        if any(_torch.GLOBAL_MODULE_HOOKS):
            raise Declined("global module hooks are registered, and they must see each module run")
        if any(module.__dict__[hooks] for hooks in _torch.MODULE_HOOKS):
            raise Declined(f"{self._path(module)} ({name}) has hooks, which must see it run")
        if "forward" in module.__dict__:
            raise Declined(f"the forward of {self._path(module)} ({name}) was replaced")
        for parameter_name in ("weight", "bias"):
            if parameter_name not in module._parameters and parameter_name in dir(module):
                raise Declined(f"{parameter_name} of {self._path(module)} ({name}) is computed, not a parameter")
        for parameter in module._parameters.values():
            if parameter is not None and type(parameter) not in PLAIN_TENSORS:
                raise Declined(f"a parameter of {self._path(module)} ({name}) is a {type(parameter).__name__}")

    def _path(self, module: torch.nn.Module) -> str:
        return next((path for path, found in self.module.named_modules() if found is module), "it") or "it"

    def _cover(self, covered: list[torch.nn.Module]) -> None:
        for module in covered:
            at = module
            while at is not self.module:
                if id(at) not in self._parents:
                    name = type(module).__name__
                    raise ValueError(f"{name} in a chain of {self.kind.__name__} is no part of it; use its own modules")
                if id(at) not in self.covered:
                    if at is not module:
                        self._check(at)
                    self._add(at)
                at = self._parents[id(at)]

    def _add(self, module: torch.nn.Module) -> None:
        self.covered[id(module)] = module
        self.watch.module(module)
        if module._modules:
            self.opened.append(module)
            self.watch.containers.append((module._modules, list(module._modules.values())))
        if module._parameters:
            self.parameters.append(module._parameters)


def _named(given: Iterable[Any]) -> Iterator[torch.nn.Module]:
    """The modules that were given for a chain."""
    for module in given:
        if isinstance(module, Group | Borrow):
            yield from _named(module.modules)
        elif isinstance(module, torch.nn.Module):
            yield module


def _name(function: Any) -> str:
    if isinstance(function, torch.nn.Module):
        return type(function).__name__
    return f"the activation {function.__name__}" if inspect.isfunction(function) else f"{function!r}"
