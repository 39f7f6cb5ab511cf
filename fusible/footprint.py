"""The memory of a plan, found before anything runs: its generated functions on tensors without data, with every
allocation and every release seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusible import _torch
from fusible.codegen import Function, backward_function, forward_function, records
from fusible.graph_op import GraphSaved
from fusible.kernels.registry import record_calls
from fusible.op import Out
from fusible.plan import Plan, Step

__all__ = ["Footprint", "Memory", "measure"]


@dataclass
class Memory:
    """One allocation that a plan keeps: its bytes, and the record fields (node index, name) that hold it."""

    bytes: int
    holders: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Footprint:
    """What a plan allocates, in bytes; the memory of inputs and parameters is not counted.

    Attributes:
        kept: held by the records between the passes.
        outputs: held by the outputs and by no record.
        forward_peak: the most alive at once in forward.
        backward_peak: the most alive at once in backward, with incoming gradients and those that leave; without
        outputs. 0 without a backward.
        memories: what is kept, by identity. A graph that autograd keeps for an op without a `bwd` is in none.
        places: the identity of the memory of each value that a forward step hands on, those of inputs too.
    """

    kept: int = 0
    outputs: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    memories: dict[int, Memory] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)


class _Ledger(_torch.DispatchMode):
    """The memory that is alive and not the caller's, kept while it is open."""

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()
        self.given = {_torch.storage_id(tensor) for tensor in given if tensor is not None}
        self.live: dict[int, tuple[Any, int]] = {}
        self.refs: list[Any] = []  # of all that ever was, so that no identity comes twice
        self.peak = 0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(result)
        return result

    def note(self, result: Any) -> None:
        """Takes up what an operator returned."""
        if self.paused:
            return
        for tensor in _tensors(result):
            ref = _torch.weak_storage(tensor)
            if ref.cdata not in self.given and ref.cdata not in self.live:
                self.refs.append(ref)
                self.live[ref.cdata] = ref, tensor.untyped_storage().nbytes()
                self.peak = max(self.peak, self.total())

    def total(self) -> int:
        """Bytes alive now."""
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        return sum(size for _, size in self.live.values())

    def kernel(self, name: str, backend: str, run: Callable[[], Any], given: Any) -> Any:
        """A kernel of our own allocates what it returns; a body in torch what its operators do."""
        if self.paused or backend == "torch":
            return run()
        self.paused = True
        try:
            result = run()
        finally:
            self.paused = False
        self.note(result)
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def measure(plan: Plan, inputs: Sequence[Any], params: Sequence[Any], backward: bool = True) -> Footprint:
    """The footprint of one call of a plan. Of `inputs` and `params` shape, dtype and device are looked at.

    Meta tensors are tried first, which are quick, and then fake ones, which formulas may mix with others. Raises what
    an op's formula raises that cannot run without data.
    """
    given = (*inputs, *params)
    try:
        return _measure(plan, [_empty(like, "meta") for like in given], backward, nullcontext())
    except Exception:
        mode = _torch.fake_mode()
        with mode:
            flat = [_empty(like, plan.device) for like in given]
        with _torch.quiet_fakes():
            return _measure(plan, flat, backward, mode)


def _empty(like: Any, device: Any) -> Any:
    return None if like is None else torch.empty(tuple(like.shape), dtype=like.dtype, device=device)


def _measure(plan: Plan, flat: list[Any], backward: bool, mode: Any) -> Footprint:
    trains = any(plan.differentiable)
    ledger, found = _Ledger(flat), Footprint()
    with mode, torch.no_grad(), ledger, record_calls(plan.device.type, ledger.kernel):
        outs, recs = _forward(plan, forward_function(plan, want_records=trains), flat, found)
        found.forward_peak = ledger.peak
        found.memories = _memories(plan, recs, ledger.given)
        leaving = [_torch.storage_id(out) for out in outs]
        alone = set(leaving) - ledger.given - set(found.memories)
        found.outputs = sum(ledger.live[key][1] for key in alone)
        found.kept = ledger.total() - found.outputs
        if trains and backward:
            found.backward_peak = _backward(plan, ledger, flat, outs, recs)
    return found


def _forward(plan: Plan, function: Function, flat: list[Any], found: Footprint) -> tuple[list, list]:
    found.places = {value: _torch.storage_id(t) for value, t in zip(plan.inputs, flat, strict=True) if t is not None}

    def watch(step: Step) -> Callable[..., Out]:
        made = [step.nodes[-1].outs[0], *(value for node in step.nodes for value in node.outs[1:])]

        def run(*args: Any) -> Out:
            out = step.function(*args)
            found.places.update(
                (value, _torch.storage_id(tensor)) for value, tensor in zip(made, out.values, strict=True)
            )
            return out

        return run

    outs, recs = function.bind(watch)(*flat)
    return list(outs[: len(plan.outputs)]), recs  # not what crosses cuts


def _memories(plan: Plan, recs: Sequence[Any], given: set[int]) -> dict[int, Memory]:
    memories: dict[int, Memory] = {}
    for node, record in zip(records(plan), recs, strict=True):
        if isinstance(record, GraphSaved):
            continue
        for name, value in zip(type(record).fields, record, strict=True):
            if isinstance(value, Tensor) and _torch.storage_id(value) not in given:
                size = value.untyped_storage().nbytes()
                memory = memories.setdefault(_torch.storage_id(value), Memory(size))
                memory.holders.append((plan.index(node), name))
    return memories


def _backward(plan: Plan, ledger: _Ledger, flat: list[Any], outs: list[Any], recs: list[Any]) -> int:
    """The peak of backward. Records that share an output's memory are autograd's, which holds them to the end."""
    function = backward_function(plan, plan.differentiable)
    params = [flat[plan.inputs.index(value)] for value in plan.read]
    leaving = {_torch.storage_id(out) for out in outs}
    shared = [value for record in recs for value in record
              if isinstance(value, Tensor) and _torch.storage_id(value) in leaving]  # fmt: skip
    douts = tuple(torch.empty_like(out) if d else None for out, d in zip(outs, plan.differentiable, strict=True))
    outs.clear()
    ledger.peak = ledger.total()
    gradients = function.run(douts, recs, params)
    del shared, gradients
    return ledger.peak
