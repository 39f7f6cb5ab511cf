"""Both passes of a plan on tensors that have shapes and no data: which kernels run, what they cost, what is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusible import _torch
from fusible.costs import Ran, watched
from fusible.executable import Executable
from fusible.plan import Step

__all__ = ["DryRun", "dry_run", "without_data"]


@dataclass
class DryRun:
    """What a plan's steps did.

    Attributes:
        forward, backward: what each step did, by its `id`; a step is missing that could not run without data.
        backward_steps: as they run, the last of the chain first, where every output's gradient arrives.
        inputs: the tensors without data that it took.
        outputs, records: without data; `None` if the forward pass needs data.
        source: the code of both passes.
    """

    forward: dict[int, Ran] = field(default_factory=dict)
    backward: dict[int, Ran] = field(default_factory=dict)
    backward_steps: list[Step] = field(default_factory=list)
    inputs: Sequence[Tensor] = ()
    outputs: tuple[Tensor, ...] | None = None
    records: list[Any] | None = None
    source: list[str] = field(default_factory=list)


def without_data(like: Any, device: str = "meta") -> Tensor:
    """A tensor of the same shape, dtype and, where `like` has some, strides."""
    if isinstance(like, Tensor):
        return torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device=device)
    return torch.empty(tuple(like.shape), dtype=like.dtype, device=device)


def dry_run(executable: Executable, inputs: Sequence[Tensor], params: Sequence[Any]) -> DryRun:
    """Calls each step of both passes once. `inputs` have no data (`without_data`); of `params` only shapes are read.

    Meta tensors are tried first, which are quick. Formulas that mix them with tensors of their own are run again on
    fake tensors, which may be mixed.
    """
    run = DryRun(source=[executable.forward.source])
    if executable.trains:
        backward = executable.backward_for(executable.plan.differentiable)
        run.backward_steps = list(backward.steps.values())
        run.source.append(backward.source)
    quick = [*inputs, *[None if t is None else without_data(t) for t in params]]
    if not _pass(executable, run, quick, contextlib.nullcontext()):
        mode = _torch.fake_mode()
        with mode:
            slow = [None if t is None else without_data(t, str(executable.plan.device)) for t in quick]
        with _torch.quiet_fakes():
            _pass(executable, run, slow, mode)
    return run


def _pass(executable: Executable, run: DryRun, flat: Sequence[Any], mode: Any) -> bool:
    """Forward, then backward; False if either needs more than these tensors have."""
    plan, device = executable.plan, executable.plan.device.type
    run.forward, run.backward, run.outputs, run.records = {}, {}, None, None
    run.inputs = flat[: executable.num_inputs]
    with mode, torch.no_grad():
        try:
            outs, run.records = executable.forward.bind(_noting(run.forward, device))(*flat)
            run.outputs = outs[: len(plan.outputs)]
        except Exception:
            return False
        if not executable.trains:
            return True
        pairs = zip(run.outputs, plan.differentiable, strict=True)
        douts = [torch.empty_like(out) if depends else None for out, depends in pairs]
        backward = executable.backward_for(plan.differentiable).bind(_noting(run.backward, device))
        try:
            backward(douts, list(run.records), [flat[place] for place in executable.read])
        except Exception:
            return False
    return True


def _noting(found: dict[int, Ran], device: str) -> Callable[[Step], Callable[..., Any]]:
    def bind(step: Step) -> Callable[..., Any]:
        return watched(step.function, device, lambda ran: found.__setitem__(id(step), ran))

    return bind
