"""Ops that have only `reference`: run under grad on their own in forward, differentiated in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from fusible._torch import keep_graph, saved_tensor_hooks
from fusible.op import Env, Grads, Op, Out, Saved

__all__ = ["GraphSaved", "check_replayed", "graph_bwd", "graph_fwd"]


class Graph(NamedTuple):
    """The small graph of one op in one call.

    Where it begins and ends are edges, so that the only tensors kept are those that the formula's own nodes read.
    """

    begins: list[Any]  # per argument
    ends: list[Any]  # per output
    samples: list[torch.Tensor]  # of the outputs
    store: _Store | None


class GraphSaved(Saved):
    """A graph and, under saved-tensor hooks, the tensors that its nodes read: a record's tensors pass the hooks."""

    graph: Graph

    def __new__(cls, *values: Any) -> GraphSaved:
        return tuple.__new__(cls, values)


class _Store:
    """Takes the tensors of a formula's graph out of it, and puts them back for its backward.

    A graph of its own would unpack them in a backward pass of its own, for each of which a checkpoint computes
    everything again.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.versions: list[int] = []

    def pack(self, tensor: torch.Tensor) -> int:
        self.tensors.append(tensor)
        self.versions.append(_version(tensor))
        return len(self.tensors) - 1

    def unpack(self, place: int) -> torch.Tensor:
        return self.tensors[place]

    def take(self) -> list[torch.Tensor]:
        """Raises `RuntimeError` if the formula wrote over what its own graph reads, which autograd cannot see here."""
        tensors, self.tensors = self.tensors, []
        if [_version(tensor) for tensor in tensors] != self.versions:
            raise RuntimeError("a tensor needed for the gradient was modified by an inplace operation")
        return tensors


class _Begin(Function):
    """Begins a formula's graph with a node that holds no tensor, unlike a leaf."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, *tensors: torch.Tensor) -> Any:
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("gradients are taken where they arrive here")


def graph_fwd(op: Op, env: Env, label: str) -> Callable[..., Out]:
    """A `fwd` made of `reference`."""
    names = type(op).signature.gradients
    wanted = [getattr(env.needs, name) for name in names]

    def fwd(*tensors: torch.Tensor) -> Out:
        versions = [_version(tensor) for tensor in tensors]
        store = _Store() if any(wanted) and saved_tensor_hooks() else None
        with (
            saved_tensors_hooks(store.pack, store.unpack) if store else nullcontext(),
            torch.set_grad_enabled(any(wanted)),
            torch.autocast(env.device_type, dtype=env.autocast, enabled=env.autocast is not None),
        ):
            copies: list[Any] = _begin(tensors, wanted)
            try:
                outs = op.reference(*copies)
                kept = store.take() if store else []
            except (RuntimeError, ValueError, IndexError) as error:
                if type(error) not in (RuntimeError, ValueError, IndexError):
                    raise
                raise type(error)(f"{label}: {error}") from error
            outs = outs if isinstance(outs, tuple) else (outs,)
        for name, tensor, version in zip(names, tensors, versions, strict=True):
            if _version(tensor) != version:
                raise RuntimeError(
                    f"{label}: reference changed {name} in place, which is not its own; write the formula without, "
                    f"e.g. {name}.relu() for {name}.relu_()"
                )
        if not any(wanted):
            return Out(*outs)
        begins = [get_gradient_edge(copy) if want else None for copy, want in zip(copies, wanted, strict=True)]
        ends = [get_gradient_edge(out) if out.requires_grad else None for out in outs]
        graph = Graph(begins, ends, [_sample(out) for out in outs], store)
        return Out(*[out.detach() for out in outs], saved=GraphSaved(graph, *kept))

    return fwd


def _version(tensor: torch.Tensor | None) -> int:
    """How often a tensor was changed in place; inference tensors do not count."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _begin(tensors: Sequence[torch.Tensor | None], wanted: Sequence[bool]) -> list[torch.Tensor | None]:
    """The arguments as the formula gets them: cut off from the caller's graph, with one of their own if wanted."""
    if not any(wanted):
        return [tensor if tensor is None else tensor.detach() for tensor in tensors]
    token = torch.empty(0, requires_grad=True)
    chosen = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want]
    begun = iter(_Begin.apply(token, *chosen))
    return [next(begun) if want else tensor if tensor is None else tensor.detach()
            for tensor, want in zip(tensors, wanted, strict=True)]  # fmt: skip


def _sample(out: torch.Tensor) -> torch.Tensor:
    """A few of an output's elements, by which another run is told from this one."""
    return out.detach().flatten()[:64].clone()


def _differs(now: torch.Tensor, was: torch.Tensor) -> bool:
    """Whether two samples differ by more than the rounding of what came before, which a rule may do in another
    order."""
    if now.shape != was.shape or not was.is_floating_point() or not was.numel():
        return now.shape != was.shape
    now, was = now.double().nan_to_num(), was.double().nan_to_num()
    return bool((now - was).abs().max() > 0.05 * was.abs().max())


def check_replayed(op: Op, saved: GraphSaved, outs: tuple[torch.Tensor, ...]) -> None:
    """Raises `RuntimeError` if a formula gave other numbers the second time."""
    for out, was in zip(outs, saved.graph.samples, strict=True):
        if _differs(_sample(out), was):
            raise RuntimeError(
                f"fusible: double backward through {type(op).__name__}, whose formula gave other numbers the second "
                f"time: it drew random numbers, or something that it reads has changed. Give it a "
                f"replay(saved, x, ...) that uses its record"
            )


def graph_bwd(op: Op, env: Env) -> Callable[..., Grads]:
    """A `bwd` that differentiates the kept graph."""
    extras = type(op).signature.extras
    names = type(op).signature.gradients

    def bwd(saved: GraphSaved, *gradients: torch.Tensor | None) -> Grads:
        graph, *kept = saved
        begins, ends, _, store = graph
        pairs = zip(ends, gradients, strict=False)  # behind the outputs' gradients come the parameters
        arriving = [(end, d) for end, d in pairs if d is not None and end is not None]
        inputs = [begin for begin in begins if begin is not None]
        if store:
            store.tensors = kept
        found = iter(_grad(arriving, inputs) if arriving else [None] * len(inputs))
        if store and not keep_graph():
            store.tensors = []
        grads = {name: None if begin is None else next(found) for name, begin in zip(names, begins, strict=True)}
        return Grads(*[grads.pop(name) for name in ("x", *extras)], **grads)

    return bwd


def _grad(arriving: list, inputs: list) -> tuple:
    ends, gradients = zip(*arriving, strict=True)
    return torch.autograd.grad(ends, inputs, gradients, retain_graph=keep_graph(), allow_unused=True)
