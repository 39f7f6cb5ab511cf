"""One block run in two ways, fused and by its plain formulas, with the same random numbers and incoming gradients."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.kernels.dropout import same_masks
from fusible.sequential import Sequential
from fusible.tolerance import NEARBY, check_kind, coarsest_dtype, compare, moved, require, same

__all__ = ["SEED", "Trial", "double", "like", "seed"]

SEED = 20


class Result:
    """Outputs and gradients of one run, by name."""

    def __init__(self, outputs: Sequence[Tensor], leaves: dict[str, Tensor], shared: set[str]) -> None:
        self.outputs = [out.detach() for out in outputs]
        self.grads = {name: leaf.grad for name, leaf in leaves.items()}
        self.shared = shared

    def items(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from ((f"output {place}", out) for place, out in enumerate(self.outputs))
        yield from ((f"gradient of {name}", grad) for name, grad in self.grads.items())


class Trial:
    """A block with inputs, run in either way with the same random numbers and incoming gradients."""

    def __init__(self, block: Sequential, inputs: Sequence[Tensor], named: dict[str, Tensor]) -> None:
        self.block = block
        self.inputs = [t.detach() for t in inputs]
        self.named = {name: t.detach() for name, t in named.items()}
        self.frozen: set[str] = set()
        self.used: Callable[[int], bool] = lambda place: True
        self.layout: Callable[[Tensor], Tensor] = lambda grad: grad
        self.hooks: Callable[[], Any] = contextlib.nullcontext

    def names(self) -> list[str]:
        extras = [f"input {place}" for place in range(len(self.inputs))]
        return [*extras, *self.named, *[name for name, _ in self.block.named_parameters()]]

    def run(
        self,
        block: Sequential,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        named: dict[str, Tensor],
        truth: Result | None = None,
    ) -> Result:
        """One forward and backward; checks that nothing of the caller's was changed, and the outputs' shapes."""
        given = [*inputs, *named.values(), *block.parameters()]
        leaves = [t.detach().requires_grad_(self._wants(name, t)) for name, t in zip(self.names(), given, strict=True)]
        xs, params = leaves[: len(inputs)], leaves[len(inputs) + len(named) :]
        keywords = dict(zip(named, leaves[len(inputs) :], strict=False))
        for parameter, leaf in zip(block.parameters(), params, strict=True):
            parameter.grad = None
            parameter.requires_grad_(leaf.requires_grad)
        real = dict(zip(self.names(), (*xs, *keywords.values(), *block.parameters()), strict=True))
        before = {name: (t._version, t.detach().clone()) for name, t in real.items()}
        seed()
        with self.hooks(), same_masks():
            outs = function(*xs, **keywords)
        outs = outs if isinstance(outs, tuple) else (outs,)
        for place, (out, right) in enumerate(zip(outs, truth.outputs, strict=True) if truth else ()):
            check_kind(f"output {place}", out, right)
        douts = [self.layout(like(out, place)) for place, out in enumerate(outs)]
        wanted = [torch.is_grad_enabled() and out.requires_grad and self.used(place) for place, out in enumerate(outs)]
        pairs = [(o, d) for o, d, want in zip(outs, douts, wanted, strict=True) if want]
        copies = [d.clone() for _, d in pairs]
        with _arriving(real) as arrived:
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [d for _, d in pairs])
        for name, (version, value) in before.items():
            require(real[name]._version == version and same(real[name], value), f"{name} was changed")
        for place, ((_, d), kept) in enumerate(zip(pairs, copies, strict=True)):
            require(same(d, kept), f"the incoming gradient {place} was changed")
        if function is self.block:
            _check_shared_outputs_are_views(outs, real)
        return Result(outs, real, _shared_gradients(arrived, [d for _, d in pairs]))

    def _wants(self, name: str, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and name not in self.frozen

    def fits(self) -> bool:
        """Whether the plain formulas and the ops take these inputs."""
        try:
            self.block.reference(*self.inputs, **self.named)
        except (RuntimeError, ValueError):
            return False
        try:
            with torch.no_grad():
                self.block(*self.inputs, **self.named)
        except ValueError:  # of an op's `infer`, which may ask for more
            return False
        return True

    def compare(self, what: str) -> None:
        """Fused against `reference`, by the one tolerance."""
        plain = self.run(self.block, self.block.reference, self.inputs, self.named)
        fused = self.run(self.block, self.block, self.inputs, self.named, plain)
        given = [*self.inputs, *self.named.values(), *self.block.parameters()]
        coarsest = coarsest_dtype([*given, *_autocast()])
        exact = plain if coarsest is torch.float64 else self._exact()
        near: list[Result] = []

        def nearby(place: int) -> list[Tensor | None]:
            if not near and exact is not plain:
                near.extend(self._exact(torch.finfo(coarsest).eps, draw) for draw in range(NEARBY))
            return [list(result.items())[place][1] for result in near]

        rows = zip(fused.items(), plain.items(), exact.items(), strict=True)
        for place, ((name, a), (_, b), (_, c)) in enumerate(rows):
            compare(f"{what}: {name}", a, b, c, coarsest, functools.partial(nearby, place))
        for text in sorted(fused.shared - plain.shared):
            raise AssertionError(f"{what}: {text}")

    def _exact(self, noise: float = 0.0, draw: int = 0) -> Result:
        """`reference` in float64, with each input, parameter and incoming gradient moved by up to `noise` of its size.

        Parameters that are float64 already stay the ones there.
        """
        generator = torch.Generator().manual_seed(SEED + draw)

        block = copy.deepcopy(self.block).double()
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.copy_(moved(parameter, noise, generator))
        named = {name: moved(double(t), noise, generator) for name, t in self.named.items()}
        inputs = [moved(double(t), noise, generator) for t in self.inputs]
        layout = self.layout
        self.layout = lambda grad: moved(layout(grad), noise, generator)
        try:
            return self.run(block, block.reference, inputs, named)
        finally:
            self.layout = layout


def _autocast() -> list[Tensor]:
    """An empty tensor of autocast's dtype, if it is on."""
    on = torch.is_autocast_enabled("cpu")
    return [torch.empty(0, dtype=torch.get_autocast_dtype("cpu"))] if on else []


@contextlib.contextmanager
def _arriving(leaves: dict[str, Tensor]) -> Iterator[dict[str, list[Tensor]]]:
    """Lists the gradients that arrive at each leaf, as they leave the graph."""
    arrived: dict[str, list[Tensor]] = {name: [] for name in leaves}

    def note(name: str) -> Callable[[Tensor | None], None]:
        return lambda grad: None if grad is None else arrived[name].append(grad)

    handles = [t.register_hook(note(name)) for name, t in leaves.items() if t.requires_grad]
    try:
        yield arrived
    finally:
        for handle in handles:
            handle.remove()


def _shared_gradients(arrived: dict[str, list[Tensor]], douts: Sequence[Tensor]) -> set[str]:
    """The gradients that are views of an incoming one or of another (law 5), in words; one object may serve twice."""
    owners = {_memory(d): (d, "an incoming gradient") for d in douts if d.numel()}
    shared = set()
    for name, grads in arrived.items():
        for grad in grads:
            owner, who = owners.setdefault(_memory(grad), (grad, "")) if grad.numel() else (grad, "")
            if owner is not grad:
                shared.add(f"the gradient of {name} shares memory with {who}")
            elif not who:
                owners[_memory(grad)] = (grad, f"the gradient of {name}")
    return shared


def _check_shared_outputs_are_views(outs: Sequence[Tensor], inputs: dict[str, Tensor]) -> None:
    """An output that shares memory with an input or another output refuses to be changed in place (G4)."""
    owners = {_memory(t): name for name, t in inputs.items() if t.numel()}
    for place, out in enumerate(outs):
        owner = owners.setdefault(_memory(out), f"output {place}") if out.numel() else f"output {place}"
        if out.requires_grad and owner != f"output {place}":
            try:
                out.mul_(1)
            except RuntimeError:
                continue
            raise AssertionError(
                f"output {place} shares memory with {owner}, yet it can be changed in place; an op whose outputs may "
                f"share memory with its inputs must not say aliases = False"
            )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def seed() -> None:
    """The same random numbers from here on. `torch.manual_seed` also queues seeds for devices that are not there:
    slow."""
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(SEED)


def double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def like(out: Tensor, place: int) -> Tensor:
    """An incoming gradient: the same numbers for each dtype."""
    generator = torch.Generator().manual_seed(SEED + place)
    noise = torch.randint(-8, 9, out.shape, generator=generator) / 8  # exact in bfloat16 too
    return noise.to(out.dtype).to(out.device)
