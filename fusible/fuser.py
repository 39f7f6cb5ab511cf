"""`OperationFuser`: finds the plan of a call, made if it is new, and runs it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from fusible import _torch
from fusible.chain import Chain
from fusible.executable import Executable
from fusible.kernels import registry
from fusible.node import autocast_off, run
from fusible.plan import Call
from fusible.planner import make_plan
from fusible.rule import RuleSet

__all__ = ["OperationFuser"]

#: Plans that one fuser keeps per rule set, and rule sets that it keeps plans of; beyond it the oldest goes.
MAX_PLANS = 128
MAX_RULE_SETS = 16

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_NEW = object()
_ABSENT = (None,)


class ParametersChanged(Exception):
    """A module no longer has a parameter that its op reads; the container must be looked at again."""


_Plans = dict[tuple, Executable | None]
_lock = threading.Lock()


def _add(cache: dict, key: Any, value: Any, most: int) -> None:
    while len(cache) >= most:
        del cache[next(iter(cache))]
    cache[key] = value


class OperationFuser:
    """Runs a chain of ops, fused by rules, as one autograd node.

    Keeps one plan per kind of call: last dimension (of a width, not of a length: `Op.lengthwise`), dtype, device and
    `requires_grad` of each input; shape, dtype, device, type and `requires_grad` of each parameter; `training` of each
    op; grad mode, autocast, forced kernel backend, rules and recipe. Rows, rank and strides are not part of it.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.lengths = chain.lengths
        sources: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        for node in chain.nodes:
            for owner, name in node.op.sources():
                sources.setdefault((id(owner), name), (owner, name))
        self.sources = list(sources.values())
        self.dicts = [node.op.__dict__ for node in chain.nodes]
        self.by_rules: dict[RuleSet, _Plans] = {}
        self.current: tuple[RuleSet | None, _Plans] = (None, {})  # one object, so that threads see a pair that fits

    def __call__(self, inputs: tuple[Tensor, ...], rules: RuleSet) -> tuple[Tensor, ...] | None:
        """The chain's outputs, the stream first; `None` if a parameter's type asks for the plain path."""
        executable, flat, grad = self.find(inputs, rules)
        if executable is None:
            return None
        shapes = tuple([tensor.shape for tensor in inputs])
        if shapes not in executable.shapes:
            executable.check_shapes(inputs)
        if _torch.any_autocast():
            with autocast_off():
                return run(executable, flat, grad)
        return run(executable, flat, grad)

    def find(self, inputs: tuple[Tensor, ...], rules: RuleSet) -> tuple[Executable | None, list, bool]:
        """The plan for this kind of call, made if it is new; with the flat list of inputs and parameters."""
        current = self.current
        if current[0] is not rules:
            current = self._use(rules)
        try:
            params = [owner[name] for owner, name in self.sources]
        except KeyError:
            raise ParametersChanged from None
        grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        autocast = None
        if _torch.any_autocast():
            kind = inputs[0].device.type
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        parts: list[Any] = [grad, autocast, registry.forced()]
        if self.lengths:
            for value, t in zip(self.chain.inputs, inputs, strict=True):
                parts += None if value in self.lengths else t.shape[-1], t.dtype, t.device, t.requires_grad
        else:
            for t in inputs:
                parts += t.shape[-1], t.dtype, t.device, t.requires_grad
        for p in params:
            parts += _ABSENT if p is None else (p.shape, p.dtype, p.device, p.requires_grad, type(p))
        for attributes in self.dicts:
            parts.append(attributes["training"])
        key = tuple(parts)
        executable: Any = current[1].get(key, _NEW)
        if executable is _NEW:
            executable = self._plan(inputs, params, rules, grad, autocast)
            with _lock:
                _add(current[1], key, executable, MAX_PLANS)
        return executable, [*inputs, *params], grad

    @property
    def plans(self) -> _Plans:
        """The plans of the rules used last, by their keys."""
        return self.current[1]

    def _use(self, rules: RuleSet) -> tuple[RuleSet, _Plans]:
        with _lock:
            plans = self.by_rules.get(rules)
            if plans is None:
                plans = {}
                _add(self.by_rules, rules, plans, MAX_RULE_SETS)
        self.current = current = (rules, plans)
        return current

    def _plan(self, inputs: tuple, params: list, rules: RuleSet, grad: bool, autocast: Any) -> Executable | None:
        executable = None
        if all(p is None or type(p) in PLAIN_TENSORS for p in params):
            call = Call(inputs, tuple(params), rules, grad, autocast, registry.forced())
            executable = Executable(make_plan(self.chain, self.sources, call), len(inputs))
        return executable
