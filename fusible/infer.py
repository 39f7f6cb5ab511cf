"""Shapes, dtypes and devices of a chain's values, found without running it, and the errors of input that does not
fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusible import _torch
from fusible.chain import Node
from fusible.op import Op, Spec

__all__ = ["Specs"]


class Specs:
    """Finds the `Spec` of each value of a chain; `None` where an op's formula cannot be asked without data."""

    def __init__(self, nodes: Sequence[Node], autocast: torch.dtype | None) -> None:
        self.nodes = nodes
        self.autocast = autocast

    def propagate(self, inputs: Mapping[int, torch.Tensor]) -> dict[int, Spec | None]:
        """Raises `ValueError`, with the op's name and path, on input that does not fit an op."""
        specs: dict[int, Spec | None] = {
            value: Spec(tuple(tensor.shape), tensor.dtype, tensor.device) for value, tensor in inputs.items()
        }
        for node in self.nodes:
            ins = [None if value is None else specs[value] for value in node.ins]
            outs = self._infer(node, ins)
            specs.update(zip(node.outs, outs, strict=True))
        return specs

    def varying(
        self, inputs: Mapping[int, torch.Tensor], specs: Mapping[int, Spec | None], lengths: frozenset[int]
    ) -> frozenset[int]:
        """The values whose last dimension follows from more than the inputs' last dimensions, which a plan's key holds,
        those aside that are `lengths`.

        Found by asking again with twice the size in each other dimension, and with one dimension more. Where an op
        takes no such sizes, as one whose mask has a fixed dimension: with one size doubled at a time, wherever it is.
        """
        own = {value: len(t.shape) - (value not in lengths) for value, t in inputs.items()}  # how many may change

        def widths(change: Callable[[int], int], *front: int) -> dict[int, tuple[int, ...] | None]:
            return self._widths({
                v: Spec((*front, *map(change, t.shape[: own[v]]), *t.shape[own[v] :]), t.dtype, t.device)
                for v, t in inputs.items()
            })  # fmt: skip

        more = widths(lambda size: size, 2)
        asked = [widths(lambda size: 2 * max(size, 1))] if all(own.values()) else [more]
        if any(spec is not None and asked[0][value] is None for value, spec in specs.items()):
            sizes = {size for v, t in inputs.items() for size in t.shape[: own[v]]} - {0}
            asked += [widths(lambda size, one=one: 2 * size if size == one else size) for one in sizes]  # type: ignore[misc]

        def varies(value: int, width: tuple[int, ...]) -> bool:
            found = [answer[value] for answer in asked if answer[value] is not None]
            return not found or any(w != width for w in found) or more[value] not in (None, width)

        return frozenset(v for v, spec in specs.items() if spec is not None and varies(v, spec.shape[-1:]))

    def _widths(self, inputs: Mapping[int, Spec]) -> dict[int, tuple[int, ...] | None]:
        """The last dimension of each value (none for a scalar), `None` where an op does not take what it gets."""
        specs: dict[int, Spec | None] = dict(inputs)
        for node in self.nodes:
            ins = [None if value is None else specs[value] for value in node.ins]
            try:
                outs = self._infer(node, ins)
            except ValueError:
                outs = [None] * len(node.outs)
            specs.update(zip(node.outs, outs, strict=True))
        return {value: spec and spec.shape[-1:] for value, spec in specs.items()}

    def _infer(self, node: Node, ins: Sequence[Spec | None]) -> Sequence[Spec | None]:
        unknown = [None] * len(node.outs)
        if ins[0] is None or any(spec is None for spec, value in zip(ins, node.ins, strict=True) if value is not None):
            return unknown
        if node.op.is_identity():
            return [ins[0]] * len(node.outs)
        _check_devices(node, [spec for spec in ins if spec is not None])
        if type(node.op).infer is Op.infer:
            return _ask_reference(node, ins, self.autocast) or unknown
        try:
            outs = node.op.infer(*ins, autocast=self.autocast)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{node}: {error}") from None
        return (outs,) if isinstance(outs, Spec) else outs


def _check_devices(node: Node, specs: Sequence[Spec]) -> None:
    device = specs[0].device
    for spec in specs[1:]:
        if spec.device != device:
            raise ValueError(f"{node}: its extra input is on {spec.device} but x is on {device}; move one of them")
    for owner, name in node.op.sources():
        parameter = owner[name]
        if parameter is not None and parameter.device != device:
            raise ValueError(
                f"{node}: {name} is on {parameter.device} but x is on {device}; move the block or the input"
            )


def _ask_reference(
    node: Node, ins: Sequence[Spec | None], autocast: torch.dtype | None
) -> Sequence[Spec | None] | None:
    """Runs `reference` on fake tensors; `None` where it needs real data."""
    params = [owner[name] for owner, name in node.op.sources()]
    device = ins[0].device.type  # type: ignore[union-attr]
    with (
        _torch.quiet_fakes(),
        _torch.fake_mode(),
        torch.no_grad(),
        torch.autocast(device, dtype=autocast, enabled=autocast is not None),
    ):
        fakes: list[Any] = [_fake(spec) for spec in (*ins, *params)]
        try:
            outs = node.op.reference(*fakes)
        except Exception:
            return None
    outs = outs if isinstance(outs, tuple) else (outs,)
    if len(outs) != len(node.outs):
        raise TypeError(
            f"{node}: reference must return y and {len(node.outs) - 1} extra outputs, it returned {len(outs)} tensors"
        )
    return [Spec(tuple(out.shape), out.dtype, out.device) for out in outs]


def _fake(like: Any) -> torch.Tensor | None:
    return None if like is None else torch.empty(tuple(like.shape), dtype=like.dtype, device=like.device)
