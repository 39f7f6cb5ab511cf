"""Ops that have only `reference`: run under grad on detached copies in forward, differentiated in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusible._torch import keep_graph
from fusible.op import Env, Grads, Op, Out, Saved

__all__ = ["GraphSaved", "graph_bwd", "graph_fwd"]


class GraphSaved(Saved):
    """The small graph of one op in one call: (detached inputs, outputs)."""

    graph: tuple


def graph_fwd(op: Op, env: Env) -> Callable[..., Out]:
    """A `fwd` made of `reference`."""
    names = type(op).signature.gradients
    wanted = [getattr(env.needs, name) for name in names]

    def fwd(*tensors: torch.Tensor) -> Out:
        with (
            torch.set_grad_enabled(any(wanted)),
            torch.autocast(env.device_type, dtype=env.autocast, enabled=env.autocast is not None),
        ):
            copies = [_copy(tensor, want) for tensor, want in zip(tensors, wanted, strict=True)]
            outs = op.reference(*copies)
            outs = outs if isinstance(outs, tuple) else (outs,)
        return Out(*[out.detach() for out in outs], saved=GraphSaved((copies, outs)))

    return fwd


def _copy(tensor: torch.Tensor, wanted: bool) -> Any:
    return tensor if tensor is None else tensor.detach().requires_grad_(wanted)


def graph_bwd(op: Op, env: Env) -> Callable[..., Grads]:
    """A `bwd` that differentiates the kept graph."""
    extras = type(op).signature.extras
    names = type(op).signature.gradients

    def bwd(saved: GraphSaved, *gradients: torch.Tensor | None) -> Grads:
        copies, outs = saved.graph
        pairs = zip(outs, gradients, strict=False)  # behind the outputs' gradients come the parameters
        arriving = [(out, d) for out, d in pairs if d is not None and out.requires_grad]
        inputs = [copy for copy in copies if copy is not None and copy.requires_grad]
        found = iter(_grad(arriving, inputs) if arriving else [None] * len(inputs))
        grads = {
            name: next(found) if copy is not None and copy.requires_grad else None
            for name, copy in zip(names, copies, strict=True)
        }
        return Grads(*[grads.pop(name) for name in ("x", *extras)], **grads)

    return bwd


def _grad(arriving: list, inputs: list) -> tuple:
    outs, gradients = zip(*arriving, strict=True)
    return torch.autograd.grad(outs, inputs, gradients, retain_graph=keep_graph(), allow_unused=True)
