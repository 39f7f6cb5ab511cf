"""Lets something stand in for the parts of blocks while a model runs: for audits and profiles of whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fusible.sequential import Sequential

__all__ = ["Place", "blocks_of", "replaced"]


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
