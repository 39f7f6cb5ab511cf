"""The contract of a step, checked on a plan's first run: what it returns, its records, its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fusible._torch import shares_memory
from fusible.op import Grads, Op, Out, Saved, has_kernels
from fusible.plan import Plan, Step

__all__ = ["checked_backward", "checked_forward"]


def checked_forward(step: Step, plan: Plan, want_records: bool) -> Callable[..., Out]:
    """The step's function, raising `TypeError` where its `Out` breaks the contract."""
    made = step.makes
    slots = dict(step.recorded)

    def run(*args: Any) -> Out:
        out = step.function(*args)
        if not isinstance(out, Out):
            raise TypeError(f"{step}: forward must return Out(y, ...), got {type(out).__name__}")
        _check_values(step, plan, made, out.values)
        _check_names(step, "a record", out.records, slots)
        for name, node in slots.items():
            if want_records and plan.kept.get(plan.index(node)):
                _check_record(step, name, node, out.records.get(name), args)
        return out

    return run


def _check_values(step: Step, plan: Plan, made: list[int], values: tuple) -> None:
    if len(values) != len(made) or not all(isinstance(value, torch.Tensor) for value in values):
        got = ", ".join(type(value).__name__ for value in values)
        raise TypeError(
            f"{step}: forward must return y and {len(made) - 1} extra outputs, all tensors, it returned ({got})"
        )
    for value, tensor in zip(made, values, strict=True):
        spec = plan.specs.get(value)
        if spec is None or (
            tensor.dtype == spec.dtype and (value in plan.varying or tensor.shape[-1:] == spec.shape[-1:])
        ):
            continue
        node = next(node for node in step.nodes if value in node.outs)
        source = "reference gives" if type(node.op).infer is Op.infer else "infer says"
        raise TypeError(
            f"{step}: forward returned {tensor.dtype} with last dimension {list(tensor.shape[-1:])}, but {source} "
            f"{spec.dtype} with {list(spec.shape[-1:])}; one of them is wrong"
        )


def _check_names(step: Step, what: str, got: Iterable[str], known: Iterable[str]) -> None:
    unknown = [name for name in got if name not in known]
    if unknown:
        raise TypeError(f"{step}: returned {what} for {unknown[0]!r}; there is only {', '.join(known)}")


def _check_record(step: Step, name: str, node: Any, record: Any, args: tuple) -> None:
    kind = type(node.op).Saved
    whose = f"the record of {node}" if step.rule else "its record"
    if record is None:
        fields = ", ".join(kind.fields)
        raise TypeError(f"{step}: lacks {whose}; return Out(..., {name}={kind.__qualname__}({fields}))")
    if not has_kernels(type(node.op)):
        return
    if type(record) is not kind:
        raise TypeError(f"{step}: {whose} must be {kind.__qualname__}, got {type(record).__qualname__}")
    assert isinstance(record, Saved)
    first = 1 + step.rule.num_extras if step.rule else len(step.nodes[0].ins)
    taken = args[:first]  # a parameter may be an input as well
    parameters = [arg for arg in args[first:] if arg is not None and not any(arg is tensor for tensor in taken)]
    for field, value in zip(kind.fields, record, strict=True):
        if any(value is parameter for parameter in parameters):
            raise TypeError(f"{step}: {kind.__qualname__}.{field} holds a parameter; backward gets it as an argument")


def check_memory(
    plan: Plan,
    exposed: Sequence[tuple[int, Sequence[int], Sequence[int]]],
    inputs: Sequence[Any],
    outs: tuple,
    recs: list,
) -> None:
    """Raises `TypeError` if a record shares memory with a tensor of the caller's that its op neither takes nor
    makes."""
    known = {place: (took, made) for place, took, made in exposed}
    nodes = [node for node in plan.nodes if plan.kept.get(plan.index(node))]
    for place, record in enumerate(recs):
        took, made = known.get(place, ((), ()))
        own = [*[inputs[at] for at in took], *[outs[at] for at in made]]
        others = [t for at, t in enumerate(inputs) if at not in took] + [
            t for at, t in enumerate(outs) if at not in made
        ]
        for field, value in zip(type(record).fields, record, strict=False):  # behind a graph come its tensors
            if not isinstance(value, torch.Tensor) or any(shares_memory(value, tensor) for tensor in own):
                continue  # what it takes or makes is watched, whatever else is in that memory
            if any(shares_memory(value, tensor) for tensor in others):
                raise TypeError(
                    f"{nodes[place]}: its record's {field} shares memory with an input or output of the block that it "
                    f"neither takes nor makes; keep what the op takes or makes, or a copy"
                )


def checked_backward(step: Step, plan: Plan) -> Callable[..., Grads]:
    """The step's function, raising `TypeError` where its `Grads` break the contract."""

    def run(*args: Any, **into: Any) -> Grads:
        grads = step.function(*args, **into)
        if not isinstance(grads, Grads):
            raise TypeError(f"{step}: backward must return Grads(dx, ...), got {type(grads).__name__}")
        count = 1 + (step.rule.num_extras if step.rule else len(step.nodes[0].ins) - 1)
        if len(grads.values) != count:
            raise TypeError(
                f"{step}: backward must return dx and {count - 1} gradients of extra inputs, it returned "
                f"{len(grads.values)} gradients"
            )
        if step.nodes[0].ins[0] in plan.wanted and grads.values[0] is None:
            raise TypeError(f"{step}: returned no gradient for x, though it is wanted")
        if step.rule is None:
            _check_params(step, plan, step.nodes[0], grads.params)
            return grads
        present = dict(step.recorded)
        _check_names(step, "gradients", grads.params, present)
        for slot, node in present.items():
            _check_params(step, plan, node, grads.params.get(slot) or {})
        return grads

    return run


def _check_params(step: Step, plan: Plan, node: Any, grads: dict[str, torch.Tensor | None]) -> None:
    names = type(node.op).signature.params
    _check_names(step, f"a gradient of {node}", grads, names or ("no parameter",))
    values = plan.params[plan.index(node)]
    for name, value, (owner, key) in zip(names, values, node.op.sources(), strict=True):
        gradient = grads.get(name)
        if value not in plan.wanted:
            continue
        if gradient is None:
            if has_kernels(type(node.op)):
                raise TypeError(f"{step}: returned no gradient for {name} of {node}, though it is wanted")
        elif owner[key] is not None and gradient.shape != owner[key].shape:
            raise TypeError(
                f"{step}: the gradient of {name} of {node} has shape {list(gradient.shape)}, the parameter "
                f"{list(owner[key].shape)}"
            )
