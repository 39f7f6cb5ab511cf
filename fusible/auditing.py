"""`audit`: a model run plain and fused against a float64 run of the same weights, compared op by op."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusible._progress import progress
from fusible.audit_report import Audit, AuditRow
from fusible.chain import Split
from fusible.kernels.dropout import same_masks
from fusible.parts import Place, blocks_of
from fusible.plan import Step
from fusible.tolerance import NEARBY, allowed, coarsest_dtype, distance, moved
from fusible.tracing import Key, Label, See, formulas, fused
from fusible.trial import SEED, double, like

__all__ = ["audit"]


def audit(model: torch.nn.Module, *inputs: Any, **named: Any) -> Audit:
    """Runs a model plain and fused against a float64 run of the same weights, and lists how the error grows in each.

    Plain: each op by its formula under ordinary autograd. Fused: as the model's blocks run, with their rules or those
    of `use_rules`. In both passes each op's result is compared, as far as a fused step shows it; outside of blocks,
    what enters them, the model's outputs, and the gradients of its inputs and parameters. Backward runs where something
    requires a gradient and grad mode is on, from incoming gradients that are the same in all runs.

    A result is within tolerance if it is no further from float64 than twice plain torch, or than twice what float64
    moves if inputs, parameters and incoming gradients move by a rounding error; in float64 a relative 1e-10.

    All runs are of copies, from the same random state: the model, its gradients and buffers, the inputs and the random
    state stay as they are. Hooks of the model run in each. What a model keeps outside of parameters and buffers is not
    converted to float64.

    Args:
        model: a `Sequential`, or a module that contains some.
        inputs, named: as for a call; tensors in tuples, lists and dictionaries are found.

    Raises:
        TypeError: `model` is no module, or returns no tensor.
        ValueError: nothing in it is a `Sequential`.
        RuntimeError: it cannot run in float64.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"audit: model must be a torch.nn.Module, got {type(model).__name__}; pass the model itself")
    if not blocks_of(model):
        raise ValueError(
            f"audit: {type(model).__name__} contains no fusible.Sequential, so nothing in it is fused; audit a model "
            f"that does"
        )
    subject = _Subject(model, inputs, named)
    truth, plain, trial = _Truth(), _Plain(), _Fused()
    with progress(f"audit of {type(model).__name__}", 3 + NEARBY) as advance:
        try:
            subject.run(truth.see, formulas, exact=True)
        except (ValueError, TypeError):
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"audit: {type(model).__name__} cannot run in float64: {error}; register tensors that it keeps as "
                f"buffers, and take dtypes from inputs or parameters"
            ) from error
        advance()
        plain.truth = trial.truth = truth
        plain.coarsest = subject.coarsest()
        subject.run(plain.see, formulas)
        advance()
        subject.run(trial.see, lambda model, see: fused(model, see, trial.covered))
        advance()
        over = [key for key, found in trial.found.items() if key in plain.limits and found.far > plain.limits[key]]
        for draw in range(NEARBY if over and plain.coarsest is not torch.float64 else 0):
            near = _Near(truth, plain.limits)
            subject.run(near.see, formulas, exact=True, noise=torch.finfo(plain.coarsest).eps, draw=draw)
            advance()
    return Audit(f"{type(model).__name__} against float64", tuple(_rows(truth, plain, trial)))


class _Error(NamedTuple):
    """How far a tensor is from the float64 one: absolutely, and relative to the largest and to the mean square."""

    far: float
    max: float
    rms: float


def _error(got: Tensor, exact: Tensor) -> _Error:
    if got.shape != exact.shape or bool((got.isnan() != exact.isnan()).any()):
        return _Error(math.inf, math.inf, math.inf)
    if not got.numel():
        return _Error(0.0, 0.0, 0.0)
    far = distance(got, exact)
    right = exact.double().nan_to_num(0.0, 0.0, 0.0)
    difference = (got.double() - exact.double()).nan_to_num(0.0, 0.0, 0.0)
    return _Error(far, _ratio(far, right.abs().max().item()),
                  _ratio(difference.square().mean().sqrt().item(), right.square().mean().sqrt().item()))  # fmt: skip


def _ratio(error: float, of: float) -> float:
    return error / of if of else (math.inf if error else 0.0)


_Seen = Key | str
"""What a tensor is: within a block a key, outside of blocks a name."""


class _Truth:
    """The float64 values, in the order in which they came about."""

    def __init__(self) -> None:
        self.tensors: dict[_Seen, Tensor] = {}
        self.labels: dict[_Seen, Label | None] = {}

    def see(self, key: _Seen, tensor: Tensor, label: Label | None) -> None:
        if tensor.is_floating_point():
            self.tensors[key], self.labels[key] = tensor.detach().clone(), label


class _Plain:
    """What plain torch's errors are, and what they allow."""

    truth: _Truth
    coarsest: torch.dtype

    def __init__(self) -> None:
        self.found: dict[_Seen, _Error] = {}
        self.limits: dict[_Seen, float] = {}

    def see(self, key: _Seen, tensor: Tensor, label: Label | None) -> None:
        exact = self.truth.tensors.get(key)
        if exact is not None and exact.shape == tensor.shape:
            self.found[key] = _error(tensor, exact)
            self.limits[key] = allowed(tensor, exact, self.coarsest)


class _Fused:
    """What the errors are fused, and which steps cover which ops."""

    truth: _Truth

    def __init__(self) -> None:
        self.found: dict[_Seen, _Error] = {}
        self.covered: dict[tuple[Place, str, int], Step] = {}

    def see(self, key: _Seen, tensor: Tensor, step: Step | None) -> None:
        exact = self.truth.tensors.get(key)
        if exact is not None:
            self.found[key] = _error(tensor, exact)


class _Near:
    """Widens what is allowed by what a rounding error of what goes in does to float64."""

    def __init__(self, truth: _Truth, limits: dict[_Seen, float]) -> None:
        self.truth, self.limits = truth, limits

    def see(self, key: _Seen, tensor: Tensor, label: Label | None) -> None:
        exact = self.truth.tensors.get(key)
        if key in self.limits and exact is not None and exact.shape == tensor.shape:
            self.limits[key] = max(self.limits[key], 2 * distance(tensor, exact))


# -- running -----------------------------------------------------------------------------------------------------------


class _Subject:
    """A model with its inputs, of which copies run."""

    def __init__(self, model: torch.nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
        self.model, self.inputs, self.named = model, inputs, named
        self.given = list(_tensors((*inputs, named)))
        used = [*model.parameters(), *model.buffers(), *self.given]
        self.devices = sorted({t.device.index for t in used if t.device.type == "cuda"})

    def coarsest(self) -> torch.dtype:
        """The dtype that limits what can be expected."""
        given = [*self.model.parameters(), *self.given]
        kinds = {t.device.type for t in given} or {"cpu"}
        narrow = [torch.empty(0, dtype=torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]
        return coarsest_dtype([*given, *narrow])

    def run(
        self, see: See, way: Callable[[torch.nn.Module, See], Any], exact: bool = False, noise: float = 0, draw: int = 0
    ) -> None:
        """One forward, and a backward where gradients are wanted, of a copy of the model."""
        generator = torch.Generator().manual_seed(SEED + draw)
        model = copy.deepcopy(self.model)
        model = model.double() if exact else model
        for parameter in model.parameters():
            parameter.grad = None
            with torch.no_grad():
                parameter.copy_(moved(parameter, noise, generator)) if noise else None
        leaves: list[Tensor] = []

        def own(tensor: Tensor) -> Tensor:
            new = moved(double(tensor.detach()) if exact else tensor.detach(), noise, generator)
            leaves.append(new.clone().requires_grad_(tensor.requires_grad))
            return leaves[-1]

        inputs, named = _map(self.inputs, own), _map(self.named, own)
        drawn = _DrawnAs(self.coarsest()) if exact else contextlib.nullcontext()
        with torch.random.fork_rng(devices=self.devices), same_masks(), drawn, way(model, see):
            outs = list(_tensors(model(*inputs, **named)))
            if not outs:
                raise TypeError(f"audit: {type(model).__name__} must return tensors, it returned none")
            for place, out in enumerate(outs):
                see(f"output {place}", out.detach(), None)  # type: ignore[arg-type]
            pairs = [(out, like(out, place)) for place, out in enumerate(outs) if out.requires_grad]
            if pairs:
                douts = [moved(dout, noise, generator) for _, dout in pairs]
                torch.autograd.backward([out for out, _ in pairs], douts)
        found = {f"input {place}": leaf.grad for place, leaf in enumerate(leaves)}
        shown = _shown(model)
        found.update((name, p.grad) for name, p in model.named_parameters() if id(p) not in shown)
        for name, gradient in found.items():
            if gradient is not None:
                see(f"gradient of {name}", gradient, None)  # type: ignore[arg-type]


class _DrawnAs(TorchFunctionMode):
    """Draws random float64 numbers in another dtype, whose generator gives others than float64's."""

    LIKE = (torch.rand_like, torch.randn_like)
    IN_PLACE = (Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.log_normal_)

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in self.LIKE and args[0].dtype is torch.float64 and "dtype" not in kwargs:
            return function(args[0].to(self.dtype), *args[1:], **kwargs).double()
        if function in self.IN_PLACE and args[0].dtype is torch.float64:
            return args[0].copy_(function(torch.empty_like(args[0], dtype=self.dtype), *args[1:], **kwargs))
        return function(*args, **kwargs)


def _shown(model: torch.nn.Module) -> set[int]:
    """The parameters that chains show and nothing else has, by identity."""
    fusers = [part for block in blocks_of(model).values() for part in block.resolved().parts]
    read = {id(owner[name]) for part in fusers if not isinstance(part, Split) for owner, name in part.sources}
    names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {number for number in read if names[number] == 1}


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same with `function` of each tensor; anything else as it is."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is dict:
        return {name: _map(part, function) for name, part in value.items()}
    return type(value)(_map(part, function) for part in value) if type(value) in (tuple, list) else value


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(truth: _Truth, plain: _Plain, trial: _Fused) -> list[AuditRow]:
    """In the order in which things come about: forward, then backward from the last part to the first."""
    order = {part: number for number, part in enumerate(dict.fromkeys(_part(key) for key in truth.labels))}
    rows: list[tuple[tuple, Callable[[_Plain, _Fused], AuditRow]]] = []
    for key, label in truth.labels.items():
        hidden = key not in trial.found and isinstance(key, Key) and key.kind == "record"
        if key not in plain.found or hidden:  # its op's result, hidden too, has a row
            continue
        if isinstance(key, str):
            direction = "backward" if key.startswith("gradient") else "forward"
            rows.append(((direction == "backward", len(order), (0, len(rows))), _row(key, direction, "", key, "")))
            continue
        assert label is not None
        direction = "backward" if key.kind == "gradient" else "forward"
        step = _step_of(key, label, direction, trial)
        at = order[_part(key)]
        where = (direction == "backward", -at if direction == "backward" else at, label.order)
        rows.append((where, _row(key, direction, label.op, label.name, step.rule.name if step and step.rule else "")))
    rows.sort(key=lambda pair: pair[0])
    return [row(plain, trial) for _, row in rows]


def _part(key: _Seen) -> Any:
    return "" if isinstance(key, str) else (key.place, key.call)


def _step_of(key: Key, label: Label, direction: str, trial: _Fused) -> Step | None:
    covered = trial.covered
    if direction == "forward":
        return covered.get((key.place, direction, key.value))
    return next((step for (place, way, _), step in covered.items() if place == key.place and way == direction
                 and label.op in step.ops.split(", ")), None)  # fmt: skip


def _row(key: _Seen, direction: str, op: str, value: str, rule: str) -> Callable[[_Plain, _Fused], AuditRow]:
    def made(plain: _Plain, trial: _Fused) -> AuditRow:
        error, other = plain.found[key], trial.found.get(key)
        limit = plain.limits[key]
        excess = None if other is None else _ratio(other.far, limit)
        block = "" if isinstance(key, str) else key.place.block
        call = 1 if isinstance(key, str) else key.call
        return AuditRow(
            direction=direction, block=block, call=call, op=op, value=value, rule=rule,
            plain_max=error.max, plain_rms=error.rms,
            fused_max=other and other.max, fused_rms=other and other.rms,
            excess=excess,
        )  # fmt: skip

    return made
