"""From a container of modules to chains of ops: flattening, channels, and the splits around modules that are no ops.

A *value* is a number: 0 is the stream where it enters a chain, then come the chain's extra inputs, then what its ops
make. A *channel* is a value with a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fusible import _torch
from fusible.op import Absent, Op, check_kind, view
from fusible.ops import TWINS, AddExtraInput, MakeExtraOutput, Residual

__all__ = ["Chain", "Layout", "Node", "Split", "resolve"]


class Node(NamedTuple):
    """One op at its place: which values it takes and makes (`None` for an extra input that is absent)."""

    op: Op
    path: str
    label: str
    ins: tuple[int | None, ...]
    outs: tuple[int, ...]

    def __str__(self) -> str:
        return self.label


class Chain(NamedTuple):
    """Ops that run as one: nodes in order, the values that enter (the stream first) and those that leave."""

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def lengths(self) -> frozenset[int]:
        """The inputs whose last dimension is a length to each op that reads them, and so no part of a plan's key."""
        read: dict[int | None, bool] = {}
        for node in self.nodes:
            for name, value in zip(type(node.op).signature.gradients, node.ins, strict=False):
                read[value] = name in node.op.lengthwise and read.get(value, True)
        return frozenset(value for value in self.inputs if read.get(value))


class Split(NamedTuple):
    """A module that runs as it is, between two chains, and why."""

    module: torch.nn.Module
    path: str
    reason: str


class Layout(NamedTuple):
    """A container resolved: its chains and splits in order, and how the block's own inputs and outputs are numbered."""

    parts: tuple[Chain | Split, ...]
    positional: tuple[tuple[int, str], ...]  # (value, who asks) for each extra input passed by position
    shared: dict[str, int]  # value of each input passed by keyword
    outputs: tuple[int, ...]  # of the extra outputs, in chain order
    watch: Watch


class _Private:
    """The name of a `Residual`'s channel: equal to nothing but itself."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __str__(self) -> str:
        return f"the residual of op {self.path}"


class _Item(NamedTuple):
    op: Op
    path: str
    label: str


class Watch:
    """What a layout was made from, compared with what is there now, at each call.

    Sees a changed container, module hooks that come or go (global ones too), a replaced `forward`, a changed type
    (parametrizations) and a replaced `_parameters`. A parameter that is gone shows when the fuser reads it.
    """

    def __init__(self) -> None:
        self.containers: list[tuple[dict[str, Any], list[Any]]] = []
        self.opened: list[torch.nn.Module] = []
        self.modules: list[torch.nn.Module] = []
        self.hooks: list[dict[int, Any]] = []
        self.hooked: list[torch.nn.Module] = []
        self.global_hooks = any(_torch.GLOBAL_MODULE_HOOKS)

    def container(self, module: torch.nn.Module, outermost: bool) -> None:
        self.containers.append((module._modules, list(module._modules.values())))
        if not outermost:  # the block's own hooks see it run, and so does a forward of its own
            self.opened.append(module)
            self.module(module)

    def module(self, module: torch.nn.Module) -> None:
        self.modules.append(module)
        self.hooks += _hooks(module)

    def close(self) -> None:
        self._watched = [(m, type(m), m.__dict__, m._parameters, "forward" in m.__dict__) for m in self.modules]

    def unchanged(self) -> bool:
        """Whether the layout still holds."""
        for children, were in self.containers:
            if list(children.values()) != were:
                return False
        if any(self.hooks) or any(_torch.GLOBAL_MODULE_HOOKS) is not self.global_hooks:
            return False
        for module, kind, attributes, parameters, replaced in self._watched:
            if type(module) is not kind or attributes["_parameters"] is not parameters:
                return False
            if ("forward" in attributes) is not replaced:
                return False
        return not self.hooked or all(any(_hooks(module)) for module in self.hooked)


def _hooks(module: torch.nn.Module) -> list[dict[int, Any]]:
    return [module.__dict__[name] for name in _torch.MODULE_HOOKS]


def _label(module: torch.nn.Module, path: str) -> str:
    return f"{type(module).__name__} (op {path})"


def flatten(
    container: torch.nn.Module, is_block: Callable[[torch.nn.Module], bool], watch: Watch, prefix: str = ""
) -> Iterator[_Item | Split]:
    """The ops of a container in order, containers inside it opened, with a `Split` for each module that is no op."""
    watch.container(container, outermost=not prefix)
    for name, child in container._modules.items():
        path = prefix + name
        if child is None:
            raise TypeError(f"op {path} must be a module, got None")
        reason = _keeps_apart(child, watch)
        if reason:
            watch.hooked += [child] if any(_hooks(child)) else []
            yield Split(child, path, reason)
        elif type(child) is Residual and "forward" not in child.__dict__:
            channel, label = _Private(path), _label(child, path)
            yield _Item(_residual_op(MakeExtraOutput, channel), path, label)
            yield from flatten(child, is_block, watch, path + ".")
            yield _Item(_residual_op(AddExtraInput, channel), path, label)
        elif is_block(child):
            yield from flatten(child, is_block, watch, path + ".")
        else:
            watch.module(child)
            yield from _ops(child, path)


def _residual_op(kind: Any, channel: _Private) -> Op:
    op = kind()
    op.name = channel
    op.mismatch = "f(x) must have x's shape {extra} but has {x}"
    return op


def _keeps_apart(module: torch.nn.Module, watch: Watch) -> str | None:
    if watch.global_hooks:
        return "global module hooks are registered, and they must see each module run"
    if any(_hooks(module)):
        return f"{type(module).__name__} has hooks, which must see it run; remove them to fuse it"
    return None


def _ops(module: torch.nn.Module, path: str) -> Iterator[_Item | Split]:
    kind = TWINS.get(type(module))
    op = module if isinstance(module, Op) else view(kind, module) if kind else None
    reason = _no_op(module, op)
    if reason or op is None:
        yield Split(module, path, str(reason))
        return
    label = _label(module, path)
    for part in op.expand():
        yield _Item(part, path, label)


def _no_op(module: torch.nn.Module, op: Op | None) -> str | None:
    """Why a module cannot be part of a chain, or `None`."""
    name = type(module).__name__
    if "forward" in module.__dict__:
        return f"forward was replaced on this {name}"
    if isinstance(module, torch.nn.Sequential):
        return f"{name} is a container of its own kind or with rules of its own; it runs as a block of its own"
    if op is None:
        return f"{name} is not an op of fusible"
    if module._modules:
        return f"{name} holds other modules ({', '.join(module._modules)})"
    registered = tuple(module._parameters)
    missing = [param for param in type(op).signature.params if param not in registered and hasattr(module, param)]
    if missing:
        return f"{missing[0]} of {name} is computed by a parametrization, not a parameter"
    kind: Any = type(op)
    check_kind(kind, registered)
    return op.declines()


class _Numbering:
    """Hands out values and keeps who made, asked for and read what."""

    def __init__(self, inputs: Sequence[str]) -> None:
        self.next = 1
        twice = [name for name in inputs if inputs.count(name) > 1]
        if twice:
            raise ValueError(f"inputs={tuple(inputs)!r}: {twice[0]!r} is named twice")
        self.shared = {name: self.new() for name in inputs}
        self.made: dict[Any, tuple[int, str]] = {}
        self.read: dict[Any, str] = {}
        self.positional: list[tuple[int, str]] = []
        self.outputs: list[tuple[int, Any, bool]] = []

    def new(self) -> int:
        self.next += 1
        return self.next - 1

    def extra_input(self, name: Any, label: str, later: dict[Any, str]) -> int | None:
        if name is Absent:
            return None
        if name is None:
            self.positional.append((self.new(), label))
            return self.positional[-1][0]
        self.read[name] = label
        if name in self.made:
            return self.made[name][0]
        if name in self.shared:
            return self.shared[name]
        if name in later:
            raise ValueError(
                f"{label}: reads {name!r} before {later[name]} makes it; an op can only read what was made earlier"
            )
        raise ValueError(
            f"{label}: reads {name!r}, which no op makes; make it earlier with MakeExtraOutput({name!r}), or pass it "
            f"to the block with Sequential(..., inputs=({name!r},))"
        )

    def extra_output(self, name: Any, label: str, keep: bool) -> int:
        value = self.new()
        if name is not None:
            if name in self.made:
                raise ValueError(f"{label}: makes {name!r}, which {self.made[name][1]} has made; names are unique")
            if name in self.shared:
                raise ValueError(f"{label}: makes {name!r}, which is an input of the block; names are unique")
            self.made[name] = (value, label)
        self.outputs.append((value, name, keep))
        return value

    def leaving(self) -> tuple[int, ...]:
        """The extra outputs that the caller gets: unnamed, kept, or read by nobody."""
        return tuple(value for value, name, keep in self.outputs if name is None or keep or name not in self.read)


def resolve(container: torch.nn.Module, inputs: Sequence[str], is_block: Callable[[torch.nn.Module], bool]) -> Layout:
    """Resolves a container. Raises `ValueError` on channel names that do not work out, `TypeError` on broken ops."""
    watch = Watch()
    items = list(flatten(container, is_block, watch))
    watch.close()
    later = {name: item.label for item in items if isinstance(item, _Item) for name in item.op.extra_output_names()}
    numbering = _Numbering(inputs)
    stream = 0
    parts: list[list[Node] | Split] = [[]]
    for item in items:
        if isinstance(item, Split):
            parts += [item, []]
            stream = numbering.new()
            continue
        op = item.op
        ins = (stream, *(numbering.extra_input(name, item.label, later) for name in op.extra_input_names()))
        stream = numbering.new()
        outs = (stream, *(numbering.extra_output(name, item.label, op.keep) for name in op.extra_output_names()))
        parts[-1].append(Node(op, item.path, item.label, ins, outs))  # type: ignore[union-attr]
    unread = [name for name in numbering.shared if name not in numbering.read]
    if unread:
        raise ValueError(f"inputs={tuple(inputs)!r}: no op reads {unread[0]!r}; take it out or name it in an op")
    outputs = numbering.leaving()
    return Layout(_cut(parts, outputs), tuple(numbering.positional), numbering.shared, outputs, watch)


def _cut(parts: Sequence[list[Node] | Split], outputs: Iterable[int]) -> tuple[Chain | Split, ...]:
    """Turns runs of nodes into chains that pass on what later ones and the caller need."""
    wanted = set(outputs)
    chains: list[Chain | Split] = []
    for index in range(len(parts) - 1, -1, -1):
        nodes = parts[index]
        if isinstance(nodes, Split):
            chains.append(nodes)
            continue
        if not nodes and len(parts) > 1:
            continue
        made = [value for node in nodes for value in node.outs]
        stream = nodes[0].ins[0] if nodes else 0
        last = nodes[-1].outs[0] if nodes else 0
        taken = dict.fromkeys(v for node in nodes for v in node.ins if v is not None and v not in made and v != stream)
        extra = [value for value in made if value in wanted and value != last]
        wanted |= set(taken)
        chains.append(Chain(tuple(nodes), (stream or 0, *taken), (last, *extra)))
    return tuple(reversed(chains))
