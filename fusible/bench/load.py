"""What is timed, inside a process that runs one variant of one row: calls, floors, checks, kept bytes."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusible.bench.blocks import KINDS, dtype_of, make_block, make_inputs, make_output_gradients, make_twin
from fusible.bench.rows import Row
from fusible.sequential import Sequential
from fusible.tolerance import NEARBY, compare, moved
from fusible.trial import Trial

__all__ = ["Load", "Turn", "check", "copies", "kept_bytes", "products", "timed", "variant_load"]

#: A call that takes longer counts as it is; shorter ones are repeated for `TURN` seconds, and their median counts.
LONG = 0.05
TURN = 0.02
#: Tensors of more elements than this are checked on their first rows only.
CHECKED = 2**24


@dataclass(frozen=True)
class Turn:
    """One turn of one variant, and the probe before and after it, in seconds."""

    forward: float
    both: float
    probes: tuple[float, float]


@dataclass(frozen=True)
class Load:
    """Two calls to be timed. The times are multiplied by `scale`: a copy stands for more traffic than it makes."""

    forward: Callable[[], Any]
    both: Callable[[], Any]
    scale: tuple[float, float] = (1.0, 1.0)


def timed(call: Callable[[], Any]) -> float:
    """Seconds that the call takes, warm."""
    first = _once(call)
    if first >= LONG:
        return first
    times: list[float] = []
    while sum(times) < TURN:
        times.append(_once(call))
    return statistics.median(times)


def _once(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def variant_load(module: torch.nn.Module, row: Row, zeros: bool = False) -> Load:
    """Forward, and forward+backward, of a module.

    Gradients are taken by `autograd.grad` and dropped, as inside a network: nothing is accumulated into a `.grad`, and
    none is left from the call before, as after `zero_grad(set_to_none=True)`.
    """
    inputs, douts = make_inputs(row, zeros), make_output_gradients(row)
    leaves = [*inputs, *module.parameters()]

    def both() -> None:
        outs = module(*inputs)
        torch.autograd.grad(outs, leaves, douts)

    return Load(lambda: module(*inputs), both)


def copies(row: Row) -> Load | None:
    """The floor of a row without matrix products: its tensors read and written once, at the speed of a copy."""
    forward, both = KINDS[row.kind].moved
    if not both:
        return None
    source = make_output_gradients(row)[0]
    target = torch.empty_like(source)
    return Load(lambda: target.copy_(source), lambda: target.copy_(source), (forward / 2, both / 2))


def products(row: Row) -> Load | None:
    """The floor of a row with linear layers: their products, each into a buffer of its own."""
    linears = KINDS[row.kind].linears(row)
    if not linears or row.dtype != "float32":
        return None
    n = row.tokens
    forward: list[tuple[Tensor, Tensor, Tensor]] = []
    backward: list[tuple[Tensor, Tensor, Tensor]] = []
    for i, o in linears:
        x, weight, dy = torch.randn(n, i), torch.randn(o, i), torch.randn(n, o)
        forward.append((x, weight.t(), torch.empty(n, o)))
        backward += [(dy, weight, torch.empty(n, i)), (dy.t(), x, torch.empty(o, i))]

    def run(what: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        for a, b, out in what:
            torch.mm(a, b, out=out)

    return Load(lambda: run(forward), lambda: run([*forward, *backward]))


def kept_bytes(module: torch.nn.Module, inputs: Sequence[Tensor]) -> int | None:
    """What a forward keeps for backward beside parameters and inputs: of a block what its plan says, else by hooks."""
    if isinstance(module, Sequential):
        return module.explain(*inputs).kept_bytes
    given = {t.untyped_storage().data_ptr() for t in (*inputs, *module.parameters())}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outs = module(*inputs)
    del outs
    return sum(t.untyped_storage().nbytes() for memory, t in found.items() if memory not in given)


def check(block: Sequential, row: Row) -> str | None:
    """Compares outputs and gradients with the twin's, by the library's one tolerance; what differs, or `None`."""
    largest = max(row.hidden, *(row.width * times for times in KINDS[row.kind].inputs))
    rows = max(1, min(row.tokens, CHECKED // largest))
    inputs = [x.detach()[:rows] for x in make_inputs(row)]
    try:
        if KINDS[row.kind].random:
            Trial(block, inputs, {}).compare("against its formulas")
        else:
            _check_against_twin(block, row, inputs, [d[:rows] for d in make_output_gradients(row)])
    except AssertionError as error:
        return str(error)
    finally:
        for parameter in block.parameters():
            parameter.grad = None
    return None


def _check_against_twin(block: Sequential, row: Row, inputs: Sequence[Tensor], douts: Sequence[Tensor]) -> None:
    twin = make_twin(row)
    names = [
        *(f"output {place}" for place in range(len(douts))),
        *(f"gradient of input {i}" for i in range(len(inputs))),
    ]
    names += [f"gradient of {name}" for name, _ in twin.named_parameters()]
    fused, plain = _run(block, inputs, douts), _run(twin, inputs, douts)
    doubles, generator = copy.deepcopy(twin).double(), torch.Generator().manual_seed(3)

    def in_float64(noise: float) -> list[Tensor]:
        """The results for inputs and gradients that are moved by up to `noise` of their size."""
        xs, ds = ([moved(t.double(), noise, generator) for t in tensors] for tensors in (inputs, douts))
        return _run(doubles, xs, ds)

    def nearby(place: int) -> list[Tensor | None]:
        return [in_float64(torch.finfo(dtype_of(row)).eps)[place] for _ in range(NEARBY)]

    exact = in_float64(0.0)
    for place, (name, a, b, c) in enumerate(zip(names, fused, plain, exact, strict=True)):
        compare(name, a, b, c, dtype_of(row), functools.partial(nearby, place))


def _run(module: torch.nn.Module, inputs: Sequence[Tensor], douts: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs = module(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    grads = torch.autograd.grad(outs, [*leaves, *module.parameters()], douts)
    return [*(out.detach() for out in outs), *grads]


def module_of(row: Row, variant: str) -> torch.nn.Module:
    """The module that a variant runs."""
    if variant == "fusible":
        return make_block(row)
    twin = make_twin(row)
    return torch.compile(twin) if variant == "compile" else twin  # type: ignore[return-value]
