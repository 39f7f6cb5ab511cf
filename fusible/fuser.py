"""`OperationFuser`: finds the plan of a call and runs it under one `torch.autograd.Function`.

The only file that knows autograd. The gradient rules G1 to G8 (docs/gradient-rules.md) are kept here and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fusible import _torch
from fusible.chain import Chain
from fusible.executable import Executable
from fusible.kernels import registry
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


class Fused(Function):
    """The block's node in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, executable: Executable, flat: list, *wanted: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        outs, recs = executable.run(flat)
        shared: list[Tensor] = []
        if _torch.saved_tensor_hooks():
            places = _take_all(recs, shared)
            replayed = _without_inputs(_replayable(flat), flat, executable.num_inputs, shared)
        else:
            places = _take_shared(executable, flat, outs, recs, shared)
            replayed = _replayable(flat)
        ctx.save_for_backward(*[flat[place] for place in executable.read], *shared)
        kept = bool(shared or executable.read) or executable.holds_tensors(recs)
        ctx.call = executable, recs, places, executable.options(), kept, replayed
        leaving = _leave(executable, flat, outs)
        if executable.constant:
            ctx.mark_non_differentiable(*[leaving[place] for place in executable.constant])
        return leaving if len(leaving) > 1 else leaving[0]

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> Any:
        if torch.compiler.is_compiling():  # compiled autograd, which must not trace what chooses by versions and modes
            return torch.compiler.disable(_backward)(ctx, douts)
        return _backward(ctx, douts)


def _backward(ctx: Any, douts: tuple[Tensor | None, ...]) -> Any:
    executable, recs, places, options, kept, replayed = ctx.call
    arriving = tuple([d is not None for d in douts])
    if True not in arriving:
        return (None,) * (2 + len(executable.wanted))
    saved = ctx.saved_tensors if kept else ()  # raises if freed
    if executable.options() != options:
        _raise_changed(executable, options)
    recs = list(recs)
    params = saved[: len(executable.read)]
    if places:
        _put_shared(recs, places, saved[len(params) :])
    if torch.is_grad_enabled() or _torch.batched_backward():
        return None, None, *_replayed_backward(executable, replayed, saved[len(params) :], recs, douts)
    if kept and not _torch.keep_graph():
        ctx.call = executable, (), places, options, kept, None
    del saved, replayed
    if _torch.any_autocast():
        with _autocast_off():
            grads = executable.backward(arriving, douts, recs, params)
    else:
        grads = executable.backward(arriving, douts, recs, params)
    if executable.gradients_alias:
        grads = _own_memory(grads, douts)
    return None, None, *grads


_apply = _torch.direct_apply(Fused)


def _raise_changed(executable: Executable, were: Sequence[Any]) -> None:
    owners = [node for node in executable.plan.nodes for _ in node.op.option_sources()]
    options = zip(owners, executable.fixed, executable.options(), were, strict=True)
    for node, (_, name), now, was in options:
        if now != was:
            raise RuntimeError(
                f"{node}: {name} was {was!r} in forward and is {now!r} now, in backward, which needs it as it was; "
                f"change it between a backward and the next forward"
            )


@contextmanager
def _autocast_off() -> Iterator[None]:
    """Turns autocast off inside, for ops and kernels that choose their dtypes themselves."""
    kinds = [kind for kind in _AUTOCAST_DEVICES if torch.is_autocast_enabled(kind)]
    try:
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)
        yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)


_AUTOCAST_DEVICES = ("cpu", "cuda")


_Places = list[tuple[int, type, list, list[int]]]
"""Records with fields that autograd keeps: each one's place, type, fields, and which of these are autograd's."""


def _take_shared(executable: Executable, flat: list, outs: tuple, recs: list, shared: list[Tensor]) -> _Places:
    """Moves the record fields that share memory with a tensor of the caller's from `recs` to `shared`.

    Autograd watches them there, so that changing one in place is seen.
    """
    places: _Places = []
    for place, inputs, outputs in executable.exposed:
        record = recs[place]
        taken: list[int] | None = None
        for field, value in enumerate(record):
            if isinstance(value, Tensor) and _shares_any(value, flat, inputs, outs, outputs):
                if taken is None:
                    fields, taken = list(record), []
                    places.append((place, type(record), fields, taken))
                    recs[place] = None
                shared.append(value)
                fields[field] = None
                taken.append(field)
    return places


def _take_all(recs: list, shared: list[Tensor]) -> _Places:
    """Moves all tensors of all records to `shared`, where saved-tensor hooks see them."""
    places: _Places = []
    for place, record in enumerate(recs):
        taken = [field for field, value in enumerate(record) if isinstance(value, Tensor)]
        if taken:
            shared += [record[field] for field in taken]
            fields = [None if field in taken else value for field, value in enumerate(record)]
            places.append((place, type(record), fields, taken))
            recs[place] = None
    return places


def _shares_any(value: Tensor, flat: list, inputs: Sequence[int], outs: tuple, outputs: Sequence[int]) -> bool:
    for place in inputs:
        if value is flat[place] or _torch.shares_memory(value, flat[place]):
            return True
    for place in outputs:  # noqa: SIM110 - hot
        if _torch.shares_memory(value, outs[place]):
            return True
    return False


def _replayable(flat: Sequence[Tensor | None]) -> list[Any]:
    """What double backward would read: (tensor, version) each."""
    try:
        return [None if t is None else (t, t._version) for t in flat]
    except RuntimeError:  # inference tensors have no version, and cannot be changed in place either
        return [None if t is None else (t, None if t.is_inference() else t._version) for t in flat]


def _without_inputs(replayed: list[Any], flat: list, num_inputs: int, packed: list[Tensor]) -> list[Any]:
    """The same under saved-tensor hooks: an input's place among `packed`; one that backward does not read is not kept,
    so that checkpointing can free it."""
    for place in range(num_inputs):
        replayed[place] = next((at for at, tensor in enumerate(packed) if tensor is flat[place]), _NOT_KEPT)
    return replayed


_NOT_KEPT = "not kept"


def _put_shared(recs: list, places: _Places, tensors: Sequence[Tensor]) -> None:
    """Makes whole records of them again; `places` itself stays as it is, for another backward."""
    at = 0
    for place, kind, fields, taken in places:
        whole = list(fields)
        for field in taken:
            whole[field] = tensors[at]
            at += 1
        recs[place] = kind(*whole)


def _leave(executable: Executable, flat: Sequence[Tensor | None], outs: tuple) -> tuple[Tensor, ...]:
    """What leaves the block with grad mode on (G4).

    Alone in its memory: a detached tensor, which the caller may change in place. Sharing memory with an input or
    another output: a view, so that autograd refuses in-place changes instead of getting a gradient wrong.
    """
    if executable.all_fresh:
        return tuple([out.detach() for out in outs])
    result = []
    for out, (inputs, outputs) in zip(outs, executable.output_peers, strict=True):
        peers = [*[flat[i] for i in inputs], *[outs[i] for i in outputs]]
        shares = any(peer is not None and _torch.shares_memory(out, peer) for peer in peers)
        result.append(out.view_as(out) if shares else out.detach())
    return tuple(result)


def _own_memory(grads: tuple, douts: tuple) -> tuple:
    """Copies gradients that are views of an incoming one or of each other (law 5); one object may serve twice."""
    result: list[Tensor | None] = []
    for grad in grads:
        peers = [*douts, *result]
        if grad is not None and any(
            peer is not None and peer is not grad and _torch.shares_memory(grad, peer) for peer in peers
        ):
            grad = grad.clone()
        result.append(grad)
    return tuple(result)


def _replayed_backward(
    executable: Executable, replayed: list[Any], shared: Sequence[Tensor], recs: list, douts: tuple
) -> Sequence[Tensor | None]:
    """Gradients that can be differentiated again, or come in batches: the formulas are replayed under autograd (G7)."""
    again = torch.is_grad_enabled()
    plan = executable.plan
    flat = [_unchanged(entry, shared) for entry in replayed]
    state = torch.get_rng_state()
    device = plan.device.type
    with torch.enable_grad(), torch.autocast(device, dtype=plan.autocast, enabled=plan.autocast is not None):
        ins: list[Any] = [
            t.view_as(t) if t is not None and place in executable.wanted else t for place, t in enumerate(flat)
        ]
        outs = executable.replay(ins, recs)
    if not torch.equal(state, torch.get_rng_state()):
        torch.set_rng_state(state)
        raise RuntimeError(
            "fusible: double backward through a block in which an op drew random numbers that it did not record; "
            "take that op out, or give it a replay(saved, x, ...) that uses its record"
        )
    pairs = [(out, d) for out, d in zip(outs, douts, strict=True) if d is not None and out.requires_grad]
    inputs = [ins[place] for place in executable.wanted]
    found, given = zip(*pairs, strict=True) if pairs else ((), ())
    if not pairs:
        return [None] * len(inputs)
    return torch.autograd.grad(found, inputs, given, create_graph=again, allow_unused=True)


def _unchanged(entry: Any, shared: Sequence[Tensor]) -> Tensor | None:
    """An input for double backward, if it still is what forward saw."""
    if isinstance(entry, int):
        return shared[entry]
    if entry is None:
        return None
    if entry is _NOT_KEPT:
        raise RuntimeError(
            "fusible: double backward needs the block's input, which is not kept under saved-tensor hooks; run this "
            "block outside of them"
        )
    tensor, version = entry
    if version is not None and tensor._version != version:
        raise RuntimeError(
            f"fusible: double backward needs a tensor that was changed in place after forward (shape "
            f"{list(tensor.shape)}, version {tensor._version}, expected {version}); clone it before changing it"
        )
    return tensor


def _run(executable: Executable, flat: list, grad: bool) -> tuple[Tensor, ...]:
    if executable.trains:
        outs = _apply(executable, flat, *[flat[place] for place in executable.wanted])
        return outs if type(outs) is tuple else (outs,)
    outs = executable.run(flat)[0]
    return _leave(executable, flat, outs) if grad else tuple([out.detach() for out in outs])


_Plans = dict[tuple, Executable | None]
_lock = threading.Lock()


def _add(cache: dict, key: Any, value: Any, most: int) -> None:
    while len(cache) >= most:
        del cache[next(iter(cache))]
    cache[key] = value


class OperationFuser:
    """Runs a chain of ops, fused by rules, as one autograd node.

    Keeps one plan per kind of call: last dimension, dtype, device and `requires_grad` of each input, shape too of
    each parameter,
    `training` of each op, grad mode, autocast, forced kernel backend, rules and recipe. Rows, rank and strides are not
    part of it.
    """

    def __init__(self, chain: Chain, alone: bool = True) -> None:
        self.chain = chain
        self.alone = alone  # whether the chain is its whole block
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
            with _autocast_off():
                return _run(executable, flat, grad)
        return _run(executable, flat, grad)

    def find(self, inputs: tuple[Tensor, ...], rules: RuleSet) -> tuple[Executable | None, list, bool]:
        """The plan for this kind of call, made if it is new; with the flat list of inputs and parameters."""
        current = self.current
        if current[0] is not rules:
            current = self._use(rules, inputs[0])
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
        for t in inputs:
            parts += t.shape[-1], t.dtype, t.device, t.requires_grad
        for p in params:
            parts += _ABSENT if p is None else (p.shape, p.dtype, p.device, p.requires_grad, type(p))
        for attributes in self.dicts:
            parts.append(attributes["training"])
        key = tuple(parts)
        executable: Any = current[1].get(key, _NEW)
        if executable is _NEW:
            executable = self._plan(inputs, params, current[0], grad, autocast)
            with _lock:
                _add(current[1], key, executable, MAX_PLANS)
        return executable, [*inputs, *params], grad

    @property
    def plans(self) -> _Plans:
        """The plans of the rules used last, by their keys."""
        return self.current[1]

    def _use(self, rules: RuleSet, x: Tensor) -> tuple[RuleSet, _Plans]:
        if rules.budget is not None:
            rules = rules.at(x.numel() // max(1, x.shape[-1]))
        with _lock:
            plans = self.by_rules.get(rules)
            if plans is None:
                plans = {}
                _add(self.by_rules, rules, plans, MAX_RULE_SETS)
        self.current = current = (rules, plans)
        return current

    def _plan(self, inputs: tuple, params: list, rules: Any, grad: bool, autocast: Any) -> Executable | None:
        executable = None
        if all(p is None or type(p) in PLAIN_TENSORS for p in params):
            call = Call(inputs, tuple(params), rules, grad, autocast, registry.forced())
            if rules.budget is None:
                plan = make_plan(self.chain, self.sources, call)
            else:
                from fusible.budget import plan_within

                plan = plan_within(self.chain, self.sources, call, self.alone)
            executable = Executable(plan, len(inputs))
        return executable
