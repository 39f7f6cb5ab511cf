"""`fusible.Sequential`: a `torch.nn.Sequential` whose forward and backward run fused."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fusible import _torch
from fusible.chain import Chain, Layout, Split, resolve
from fusible.fuser import PLAIN_TENSORS, OperationFuser, ParametersChanged
from fusible.infer import Specs
from fusible.op import Op
from fusible.ops import Residual
from fusible.rule import Rule, RuleSet
from fusible.rules import DEFAULT

__all__ = ["Sequential", "use_rules"]


class _InUse(threading.local):
    rules: RuleSet | None = None
    observe: Callable[[Any, tuple, dict[str, Any]], None] | None = None


_in_use = _InUse()


@contextmanager
def use_rules(rules: Iterable[Rule]) -> Iterator[RuleSet]:
    """Makes every block of this thread use these rules, over its own `rules=`; the innermost wins.

    A backward uses the rules of its forward, wherever it runs. `fusible.rules.NONE` turns fusion off.
    """
    new = rules if isinstance(rules, RuleSet) else RuleSet(rules)
    before, _in_use.rules = _in_use.rules, new
    try:
        yield new
    finally:
        _in_use.rules = before


@contextmanager
def observed_blocks(observe: Callable[[Any, tuple, dict[str, Any]], None]) -> Iterator[None]:
    """Calls `observe(block, args, kwargs)` for each block that this thread calls on tensors without data."""
    before, _in_use.observe = _in_use.observe, observe
    try:
        yield
    finally:
        _in_use.observe = before


class Sequential(torch.nn.Sequential):
    """Runs ops one after another, fused; to autograd it is one node.

    A `torch.nn.Sequential` with the same constructor, container methods, names and state-dict keys. It takes `ops` and
    `torch.nn` modules alike; a module that is no op runs as it is, between two chains.

    Args:
        *modules: ops and modules in order, or one `OrderedDict` of them.
        rules: the rules that may fuse them, a `RuleSet` or an iterable of rules; `fusible.rules.DEFAULT` if not given.
        inputs: names of inputs that are passed by keyword and served to every op that asks for them.

    Call it as `block(x, *extra_inputs, **inputs)`. It returns `y`, or `(y, *extra_outputs)` in chain order.

    Raises:
        TypeError: a wrong number of extra inputs, a non-tensor, a module that breaks the contract of ops.
        ValueError: sizes, dtypes or devices that do not fit; channel names that do not work out.
    """

    def __init__(self, *modules: Any, rules: Iterable[Rule] | None = None, inputs: Iterable[str] = ()) -> None:
        named = modules[0].items() if len(modules) == 1 and isinstance(modules[0], OrderedDict) else enumerate(modules)
        for name, module in named:
            if not isinstance(module, torch.nn.Module):
                hint = f"; write {module.__name__}(...)" if isinstance(module, type) else ""
                raise TypeError(f"op {name} must be an op or a torch.nn module, got {_shown(module)}{hint}")
        super().__init__(*modules)
        self._rules = None if rules is None else RuleSet(rules)
        self._inputs = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        self._state: _State | None = None
        self._resolve()

    @property
    def rules(self) -> RuleSet:
        """The rules of this block where no `use_rules` is open."""
        return DEFAULT if self._rules is None else self._rules

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs passed by keyword."""
        return self._inputs

    # -- running -----------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, *extra_inputs: Tensor, **inputs: Tensor) -> Any:
        if _torch.seen_through() or type(x) not in PLAIN_TENSORS:
            if not isinstance(x, (Tensor, torch.fx.Proxy)):
                raise TypeError(f"{type(self).__name__}: x must be a tensor, got {_shown(x)}")
            if _in_use.observe is not None:
                _in_use.observe(self, (x, *extra_inputs), inputs)
            if isinstance(
                extra_inputs, torch.fx.Proxy
            ):  # symbolic tracing gives *args and **kwargs of its root as one each
                extra_inputs = tuple([extra_inputs[i] for i in range(len(self._resolve().layout.positional))])
                inputs = {name: inputs[name] for name in self._inputs}
            return self.reference(x, *extra_inputs, **inputs)
        state = self._state
        if state is None or not state.layout.watch.unchanged():
            state = self._resolve()
        rules = _in_use.rules
        if rules is None:
            rules = DEFAULT if self._rules is None else self._rules
        try:
            outs = state(x, extra_inputs, inputs, rules)
        except ParametersChanged:
            outs = self._resolve()(x, extra_inputs, inputs, rules)
        if outs is None:
            return self.reference(x, *extra_inputs, **inputs)
        return outs[0] if len(outs) == 1 else outs

    def reference(self, x: Tensor, *extra_inputs: Tensor, **inputs: Tensor) -> Any:
        """The block in plain torch: each op's formula under ordinary autograd, module by module, nothing fused."""
        run = _Plain(extra_inputs, inputs, self._inputs)
        y = run.container(self, x)
        return run.finish(y, type(self).__name__)

    def explain(self, x: Tensor | None = None, *extra_inputs: Tensor, strict: bool = False, **inputs: Tensor) -> Any:
        """The plan for this kind of call, as text, as a table in a notebook, and as data. Nothing is run.

        Shows for each step of both passes the ops it covers, its rule and its kernels, the bytes that it reads and
        writes, its FLOPs, and the time predicted from what `python -m fusible calibrate` measured; what is kept for
        backward, by which op, in bytes; and for each rule that nearly applied, and each module that splits the chain,
        the reason and the smallest change that would let it fuse. More in docs/explaining.md.

        Args:
            x, extra_inputs, inputs: as for a call; only shapes, dtypes, devices and `requires_grad` are looked at.
                Without `x`: one row that requires grad, as wide as the first op that says its width asks for.
            strict: raise `RuntimeError` with the reasons if anything did not fuse.
        """
        from fusible import calibration
        from fusible.explaining import explain_parts
        from fusible.explanation import Explanation, describe_input

        state = self.resolved()
        if x is None:
            x, extra_inputs, inputs = state.default_inputs()
        values = {0: x, **state.bind(x, extra_inputs, inputs)}
        rules = self.rules if _in_use.rules is None else _in_use.rules
        parts = explain_parts(state.parts, values, rules)
        grad = torch.is_grad_enabled()
        wanted = ["x"] if x.requires_grad and grad else []
        trained = sum(p.requires_grad for p in self.parameters()) if grad else 0
        wanted += [f"{trained} parameter" + ("" if trained == 1 else "s")] if trained else []
        title = f"{type(self).__name__} on {describe_input(values.values(), wanted)}"
        if not grad:
            title += " (grad mode is off)"
        if torch.is_autocast_enabled(x.device.type):
            title += f" (autocast to {str(torch.get_autocast_dtype(x.device.type)).removeprefix('torch.')})"
        explanation = Explanation(title, parts, calibration.find()[1])
        if strict and explanation.unfused:
            raise RuntimeError(f"{type(self).__name__} is not fully fused: " + "; ".join(explanation.unfused))
        return explanation

    def single_chain(
        self, x: Tensor, *extra_inputs: Tensor, **inputs: Tensor
    ) -> tuple[OperationFuser, tuple[Tensor, ...]]:
        """The fuser of a block that is one chain, and the chain's inputs in order. For tools that look inside.

        Raises `ValueError` if modules that are no ops split the block.
        """
        state = self.resolved()
        fuser = state.parts[0]
        if len(state.parts) > 1 or isinstance(fuser, Split):
            raise ValueError(
                f"{type(self).__name__} is more than one chain; print(block.explain(x)) shows what splits it"
            )
        values = {0: x, **state.bind(x, extra_inputs, inputs)}
        return fuser, tuple(values[value] for value in fuser.chain.inputs)

    def opened(self) -> list[torch.nn.Module]:
        """The containers inside whose ops are part of this block's chains. For tools that look inside."""
        return list(self.resolved().layout.watch.opened)

    def resolved(self) -> _State:
        """The container as it is now, resolved to chains and splits. For tools that look inside."""
        state = self._state
        return self._resolve() if state is None or not state.layout.watch.unchanged() else state

    def _resolve(self) -> _State:
        self._state = _State(resolve(self, self._inputs, _opens), type(self).__name__)
        return self._state

    # -- container ---------------------------------------------------------------------------------------------------

    def _like(self, modules: Any) -> Sequential:
        return type(self)(modules, rules=self._rules, inputs=self._inputs)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _part(self, OrderedDict(list(self._modules.items())[index]))
        return super().__getitem__(index)

    def __add__(self, other: Any) -> Sequential:
        if not isinstance(other, torch.nn.Sequential):
            return NotImplemented
        modules = [*self, *other]
        inputs = dict.fromkeys((*self._inputs, *(other._inputs if isinstance(other, Sequential) else ())))
        return Sequential(*modules, rules=self._rules, inputs=inputs)

    def __mul__(self, count: int) -> Sequential:
        if not isinstance(count, int):
            return NotImplemented
        if count <= 0:
            raise ValueError(f"Sequential * {count}: the count must be positive")
        return Sequential(*[copy.deepcopy(module) for _ in range(count) for module in self],
                          rules=self._rules, inputs=self._inputs)  # fmt: skip

    def __rmul__(self, count: int) -> Sequential:
        return self * count

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_state": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_state": None})


def _part(block: Sequential, modules: OrderedDict[str, Any]) -> Sequential:
    """A slice: it declares the shared inputs that its own ops read."""
    read = {name for module in modules.values() for op in module.modules() if isinstance(op, Op)
            for name in op.extra_input_names()}  # fmt: skip
    return Sequential(modules, rules=block._rules, inputs=[name for name in block._inputs if name in read])


def _shown(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"{value!r} ({type(value).__name__})"


def _count(extras: int) -> str:
    return f"{extras} extra input" + ("" if extras == 1 else "s")


def _opens(module: torch.nn.Module) -> bool:
    """Whether a module inside a block is opened, and its ops are fused with their neighbours."""
    if type(module) is Sequential:
        return module._rules is None and "forward" not in module.__dict__
    return type(module) in (torch.nn.Sequential, Residual) and "forward" not in module.__dict__


class _State:
    """A resolved container with one fuser per chain."""

    def __init__(self, layout: Layout, name: str) -> None:
        self.layout = layout
        self.name = name
        self.parts: list[OperationFuser | Split] = [
            OperationFuser(part) if isinstance(part, Chain) else part for part in layout.parts
        ]
        only = self.parts[0] if len(self.parts) == 1 and not layout.shared else None
        self.single = only if isinstance(only, OperationFuser) else None

    def __call__(self, x: Tensor, extras: tuple, named: dict[str, Any], rules: RuleSet) -> tuple[Tensor, ...] | None:
        """The block's outputs; `None` if a tensor's type asks for the plain path."""
        if x.dim() == 0:
            raise ValueError(f"{self.name}: x must have at least one dimension, got a scalar")
        if self.single is None or named or len(extras) != len(self.layout.positional):
            return self.run(x, self.bind(x, extras, named), rules)
        for extra in extras:
            if type(extra) not in PLAIN_TENSORS or not extra.dim():
                return self.run(x, self.bind(x, extras, named), rules)
        return self.single((x, *extras), rules)

    def bind(self, x: Tensor, extras: tuple, named: dict[str, Any]) -> dict[int, Tensor]:
        """Value numbers of the extra inputs. Raises `TypeError` if they are not the ones that the block takes."""
        positional, shared = self.layout.positional, self.layout.shared
        if len(extras) != len(positional):
            who = f" ({', '.join(label for _, label in positional)})" if positional else ""
            call = ", ".join(["x"] + [f"extra{i}" for i in range(len(positional))])
            raise TypeError(
                f"{self.name} takes {_count(len(positional))}{who}, got {len(extras)}; call it as block({call})"
            )
        for name in named:
            if name not in shared:
                raise TypeError(
                    f"{self.name} takes no input {name!r}; it has {', '.join(shared) or 'none'}, declared by inputs="
                )
        missing = [name for name in shared if name not in named]
        if missing:
            raise TypeError(f"{self.name} needs its input {missing[0]!r}; pass block(x, {missing[0]}=...)")
        values = {value: extra for (value, _), extra in zip(positional, extras, strict=True)}
        values.update((shared[name], tensor) for name, tensor in named.items())
        for tensor in values.values():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{self.name}: extra inputs must be tensors, got {_shown(tensor)}")
            if not tensor.dim():
                raise ValueError(f"{self.name}: extra inputs must have at least one dimension, got a scalar")
        return values

    def default_inputs(self) -> tuple[Tensor, tuple, dict[str, Tensor]]:
        """One row that fits the block, for `explain()`."""
        chain = self.parts[0]
        nodes = chain.chain.nodes if isinstance(chain, OperationFuser) else ()
        parameters = [owner[name] for node in nodes for owner, name in node.op.sources()]
        like = next((p for p in parameters if p is not None), torch.empty(0))
        widths = [p.shape[-1] for p in parameters if p is not None]
        widths = [factor * width for width in widths[:1] for factor in (1, 2)]
        xs = [torch.empty(1, width, dtype=like.dtype, device=like.device).requires_grad_() for width in widths]
        if nodes and "x" in nodes[0].op.lengthwise:
            xs = [torch.zeros(1, 1, dtype=torch.int64, device=like.device)]
        for x in xs:
            extras = dict.fromkeys(chain.chain.inputs[1:], x) if isinstance(chain, OperationFuser) else {}
            try:
                Specs(nodes, None).propagate({0: x, **extras})
            except ValueError:
                continue
            return x, (x,) * len(self.layout.positional), dict.fromkeys(self.layout.shared, x)
        raise ValueError(f"{self.name}.explain() cannot tell the width of x from the ops; give it x, as in explain(x)")

    def run(self, x: Tensor, values: dict[int, Tensor], rules: RuleSet) -> tuple[Tensor, ...] | None:
        """Runs chains and splits in order; `None` if a tensor's type asks for the plain path."""
        if any(type(tensor) not in PLAIN_TENSORS for tensor in values.values()):
            return None
        for part in self.parts:
            if isinstance(part, Split):
                x = part.module(x)
                if part is not self.parts[-1] and not (isinstance(x, Tensor) and x.dim()):
                    got = "a scalar" if isinstance(x, Tensor) else _shown(x)
                    what = f"{type(part.module).__name__} (op {part.path})"
                    raise TypeError(
                        f"{what} must return a tensor of at least one dimension for what follows it, got {got}"
                    )
                continue
            chain = part.chain
            outs = part((x, *[values[value] for value in chain.inputs[1:]]), rules)
            if outs is None:
                return None
            x = outs[0]
            values.update(zip(chain.outputs[1:], outs[1:], strict=True))
        return (x, *[values[value] for value in self.layout.outputs])


def _has_hooks(module: torch.nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any([len(hook) for hook in hooks])  # noqa: C419 - hot


class _Plain:
    """Walks the modules of a block and calls each as it is, channels in hand."""

    def __init__(self, extras: tuple, named: dict[str, Any], inputs: tuple[str, ...]) -> None:
        self.extras = list(extras)
        self.channels: dict[Any, Tensor] = dict(named)
        self.inputs = inputs
        self.outputs: list[tuple[Any, Tensor, bool]] = []
        self.read: set[Any] = set()

    def container(self, container: torch.nn.Module, x: Tensor) -> Tensor:
        children: Any = container._modules.values()
        for child in children:
            open_ = isinstance(child, torch.nn.Sequential) and _opens(child) and not _has_hooks(child)
            if open_ and isinstance(child, Residual):
                x = x + self.container(child, x)
            elif open_:
                x = self.container(child, x)
            elif isinstance(child, Op) and (child.num_extra_inputs or child.num_extra_outputs):
                x = self.op(child, x)
            else:
                x = child(x)
        return x

    def op(self, op: Op, x: Tensor) -> Tensor:
        extras = [self.take(name) for name in op.present_inputs()]
        outs = op(x, *extras)
        if not isinstance(outs, tuple):
            outs = tuple([outs[i] for i in range(1 + op.num_extra_outputs)]) if op.num_extra_outputs else (outs,)
        for name, out in zip(op.extra_output_names(), outs[1:], strict=True):
            self.channels[name] = out
            self.outputs.append((name, out, op.keep))
        return outs[0]

    def take(self, name: Any) -> Tensor:
        if name is None:
            if not self.extras:
                raise TypeError("the block takes more extra inputs than it got")
            return self.extras.pop(0)
        self.read.add(name)
        return self.channels[name]

    def finish(self, y: Tensor, name: str) -> Any:
        if self.extras:
            raise TypeError(f"{name} got {len(self.extras)} extra inputs too many")
        outs = [out for name, out, keep in self.outputs if name is None or keep or name not in self.read]
        return (y, *outs) if outs else y
