"""A block's node in the autograd graph: what it keeps, what leaves it, and its backward.

The only file that knows autograd. The gradient rules G1 to G8 (docs/gradient-rules.md) are kept here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fusible import _torch
from fusible.executable import Executable
from fusible.main_grad import accumulate, find_buffers, raise_double_backward

__all__ = ["autocast_off", "run"]


class Fused(Function):
    """The block's node in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, executable: Executable, flat: list, *wanted: Tensor) -> Any:
        outs, recs = executable.run(flat)
        return _keep(ctx, executable, flat, recs, (flat, outs), _leave(executable, flat, outs))

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> Any:
        if torch.compiler.is_compiling():  # compiled autograd, which must not trace what chooses by versions and modes
            return torch.compiler.disable(_backward)(ctx, douts)
        return _backward(ctx, douts)


class FusedSegment(Function):
    """One of the nodes of a block that has several, put behind a forward that has run.

    `ran`: its plan, records, what these may share memory with, and its results.
    """

    @staticmethod
    def forward(ctx: Any, ran: tuple[Executable, list, tuple, tuple], flat: list, *wanted: Tensor) -> Any:
        executable, recs, sharing, leaving = ran
        return _keep(ctx, executable, flat, recs, sharing, leaving)

    backward = Fused.backward


def _keep(ctx: Any, executable: Executable, flat: list, recs: list, sharing: tuple[list, tuple], leaving: tuple) -> Any:
    """Gives a node what its backward needs; `sharing`: the block's inputs and outputs, whose memory records may
    share."""
    ctx.set_materialize_grads(False)
    shared: list[Tensor] = []
    if _torch.saved_tensor_hooks():
        places = _take_all(recs, shared, flat[: executable.num_inputs])
        shared += [flat[at] for at in executable.crossed if not any(t is flat[at] for t in shared)]
        replayed = _without_inputs(_replayable(flat), flat, executable.num_inputs, shared)
    else:
        places = _take_shared(executable, *sharing, recs, shared)
        replayed = _replayable(flat)
    ctx.save_for_backward(*[flat[place] for place in executable.read], *shared)
    kept = bool(shared or executable.read) or executable.holds_tensors(recs)
    ctx.call = executable, recs, places, executable.options(), kept, replayed
    if executable.constant:
        ctx.mark_non_differentiable(*[leaving[place] for place in executable.constant])
    return leaving if len(leaving) > 1 else leaving[0]


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
    buffers = find_buffers(executable.accumulating, replayed) if executable.accumulating else []
    if torch.is_grad_enabled() or _torch.batched_backward():
        if any(buffers):
            raise_double_backward(executable.accumulating)
        return None, None, *_replayed_backward(executable, replayed, saved[len(params) :], recs, douts)
    if kept and not _torch.keep_graph():
        ctx.call = executable, (), places, options, kept, None
    into = [[b.tensor if b and not b.overwrite else None for b in buffers]] if buffers else []
    del saved, replayed
    if _torch.any_autocast():
        with autocast_off():
            grads = executable.backward(arriving, douts, recs, params, *into)
    else:
        grads = executable.backward(arriving, douts, recs, params, *into)
    if buffers:
        grads = accumulate(executable.accumulating, buffers, grads)
    if executable.gradients_alias:
        grads = _own_memory(grads, douts)
    return None, None, *grads


_apply = _torch.direct_apply(Fused)
_apply_segment = _torch.direct_apply(FusedSegment)


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
def autocast_off() -> Iterator[None]:
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


def _take_all(recs: list, shared: list[Tensor], inputs: list[Tensor]) -> _Places:
    """Moves all tensors of all records to `shared`, where saved-tensor hooks see them.

    A node's input that an earlier node made goes there with its history, in the place of the same without.
    """
    places: _Places = []
    made = {_same(tensor): tensor for tensor in inputs if not tensor.is_leaf}
    own = {id(tensor) for tensor in inputs}
    for place, record in enumerate(recs):
        taken = [field for field, value in enumerate(record) if isinstance(value, Tensor)]
        if taken:
            fields = [record[field] for field in taken]
            shared += [t if id(t) in own else made.get(_same(t), t) for t in fields]
            fields = [None if field in taken else value for field, value in enumerate(record)]
            places.append((place, type(record), fields, taken))
            recs[place] = None
    return places


def _same(tensor: Tensor) -> Any:
    """Equal for a tensor and its detached self."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), _torch.storage_id(tensor)


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


def _run_segments(executable: Executable, flat: list) -> tuple[Tensor, ...]:
    """Runs forward as a whole, then puts one node behind another, each with what crosses from those before it."""
    with torch.no_grad():
        outs, recs = executable.run(flat)
    number = len(executable.plan.outputs)
    sharing = flat, outs[:number]
    leaving = _leave(executable, flat, sharing[1]) + tuple([out.detach() for out in outs[number:]])
    pool: list[Any] = [*flat, *leaving]
    first = 0
    for segment in executable.segments:
        own = recs[first : first + segment.num_records]
        first += segment.num_records
        if segment.executable.trains:
            taken = [pool[place] for place in segment.takes]
            wanted = [taken[place] for place in segment.executable.wanted]
            ran = segment.executable, own, sharing, tuple([pool[place] for place in segment.gives])
            made = _apply_segment(ran, taken, *wanted)
            for place, out in zip(segment.gives, made if type(made) is tuple else (made,), strict=True):
                pool[place] = out
    return tuple(pool[len(flat) : len(flat) + number])


def run(executable: Executable, flat: list, grad: bool) -> tuple[Tensor, ...]:
    """The outputs of a plan on inputs and parameters; behind nodes where gradients are wanted."""
    if executable.segments:
        return _run_segments(executable, flat)
    if executable.trains:
        outs = _apply(executable, flat, *[flat[place] for place in executable.wanted])
        return outs if type(outs) is tuple else (outs,)
    outs = executable.run(flat)[0]
    return _leave(executable, flat, outs) if grad else tuple([out.detach() for out in outs])
