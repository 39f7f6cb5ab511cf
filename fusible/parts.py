"""Lets something stand in for the parts of blocks while a model runs: for audits and profiles of whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.sequential import Sequential

__all__ = ["Place", "blocks_of", "nodes_of", "replaced"]


class Place(NamedTuple):
    """One part (a chain or a split) of one block, by the block's path in the model; "" is the model itself."""

    block: str
    part: int


def blocks_of(model: torch.nn.Module) -> dict[str, Sequential]:
    """The blocks of a model by their paths, those inside of others too."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Sequential)}


@contextmanager
def replaced(model: torch.nn.Module, stand_in: Callable[[Place, Any], Any]) -> Iterator[None]:
    """Lets `stand_in(place, part)` run for each part of each block.

    The stand-in of a chain takes what an `OperationFuser` takes and has its `chain`; that of a split is a `Split`.
    """
    before = []
    try:
        for name, block in blocks_of(model).items():
            state = block.resolved()
            before.append((state, state.parts, state.single))
            state.parts = [stand_in(Place(name, number), part) for number, part in enumerate(state.parts)]
            state.single = None
        yield
    finally:
        for state, parts, single in before:
            state.parts, state.single = parts, single


def nodes_of(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Any]:
    """The nodes of a chain's call in the autograd graph, one or, where it is cut, several; the last one first."""
    found: list[Any] = []
    beyond = {tensor.grad_fn for tensor in inputs}
    reached = [out.grad_fn for out in outputs]
    while reached:
        node = reached.pop(0)
        if node is not None and node not in beyond and type(node).__name__ in ("FusedBackward", "FusedSegmentBackward"):
            beyond.add(node)
            found.append(node)
            reached += [follows for follows, _ in node.next_functions]
    return found
