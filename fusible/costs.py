"""What a step costs: the bytes that it reads and writes, its FLOPs, and the seconds that a calibrated machine takes.

Nothing is run for it: a plan's steps are called with tensors that have shapes and no data (`dry_run`). FLOPs are those
of matrix products and attention, a multiplication and an addition counted as two; pointwise arithmetic counts as none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import flop_counter

from fusible import _torch
from fusible.kernels.registry import record_calls
from fusible.op import Grads, Out, Spec

if TYPE_CHECKING:
    from fusible.calibration import Calibration

__all__ = ["Cost", "Meter", "Ran", "Work", "cost_of", "floor", "moved", "predict", "watched"]

#: Operators that write their first argument without reading it.
_OVERWRITE = ("copy_", "fill_", "zero_", "bernoulli_", "random_", "uniform_", "normal_")
#: Operators that touch no memory.
_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh")


class Work(NamedTuple):
    """What one kernel, or one of torch's operators outside of a kernel of ours, does within a step."""

    name: str
    backend: str
    dtype: torch.dtype
    read: int
    written: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @property
    def key(self) -> str:
        """By which a calibration knows it."""
        return f"{self.backend}.{self.name}"


class Cost(NamedTuple):
    """What a step costs.

    Attributes:
        read, written: bytes of the tensors that enter the step and that it makes, each memory once; what it makes and
            uses up inside is not among them, so that they are the least that any kernel for it must move. A step that
            only hands on what it gets moves nothing.
        flops: of its matrix products.
        work: what is done inside, in order, with the bytes that each part moves.
    """

    read: int
    written: int
    flops: int
    work: tuple[Work, ...] = ()

    @property
    def bytes(self) -> int:
        return self.read + self.written


class Ran(NamedTuple):
    """One step, run on tensors without data."""

    kernels: tuple[str, ...]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    cost: Cost


# -- bytes -------------------------------------------------------------------------------------------------------------


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dictionaries, `Out` and `Grads`, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Out, Grads)):
        yield from tensors_in(value.values)
        yield from tensors_in(value.records if isinstance(value, Out) else value.params)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)


def touched(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, those that an expanded dimension repeats once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride or not size) * tensor.element_size()


def sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes touched per memory; views of one memory count together, up to its size."""
    found: dict[int, dict[tuple, int]] = {}
    whole: dict[int, int] = {}
    for tensor in tensors:
        storage = _torch.storage_id(tensor)
        part = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        found.setdefault(storage, {})[part] = touched(tensor)
        whole[storage] = tensor.untyped_storage().nbytes()
    return {storage: min(sum(parts.values()), whole[storage]) for storage, parts in found.items()}


def moved(given: Any, made: Any) -> tuple[int, int]:
    """Bytes (read, written) by something that takes the tensors in `given` and returns those in `made`.

    What it returns of the memory that it was given is not written; if it makes nothing else, nothing is read either.
    """
    inputs, outputs = sizes(tensors_in(given)), sizes(tensors_in(made))
    written = sum(size for storage, size in outputs.items() if storage not in inputs)
    return (sum(inputs.values()), written) if written else (0, 0)


# -- FLOPs and work ----------------------------------------------------------------------------------------------------


def _dot(a: Any, b: Any, *args: Any, **options: Any) -> int:
    return 2 * max(a.numel(), b.numel())


def _add_dot(c: Any, a: Any, b: Any, *args: Any, **options: Any) -> int:
    return _dot(a, b)


def _attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> int:
    rows, keys = query.numel() // query.shape[-1], key.shape[-2]
    return 2 * rows * keys * (query.shape[-1] + value.shape[-1])


def _attention_backward(dout: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> int:
    rows, keys = query.numel() // query.shape[-1], key.shape[-2]
    return 2 * rows * keys * (3 * query.shape[-1] + 2 * value.shape[-1])


_aten = torch.ops.aten
#: FLOPs by operator, beside torch's own table.
_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten.mv: _dot,
    _aten.addmv: _add_dot,
    _aten.dot: _dot,
    _torch.cpu_attention: _attention,
    _torch.cpu_attention_backward: _attention_backward,
}


def flops_of(packet: Any, args: Sequence[Any], options: dict[str, Any], result: Any) -> int:
    """FLOPs of one call of an operator: 0 for all that are no products."""
    formula = _FORMULAS.get(packet)
    if formula is not None:
        return formula(*args, **options)
    formula = flop_counter.flop_registry.get(packet)
    return formula(*args, **options, out_val=result) if formula else 0


class Meter(_torch.DispatchMode):
    """Notes the work of what runs inside: that of kernels of ours as a whole, else operator by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Work] = []
        self.calls: list[tuple[str, str]] = []
        self.flops = 0
        self._inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        packet = func.overloadpacket
        flops = flops_of(packet, args, options, result)
        self.flops += flops
        name = packet.__name__
        if not self._inside and name not in _FREE:
            read, written = _operator_bytes(func, name, args, options, result)
            if written:
                self.work.append(Work(name, "torch", _dtype(result), read, written, flops))
        return result

    def kernel(self, name: str, backend: str, run: Callable[[], Any], given: Any) -> Any:
        """Runs a kernel's torch body, or remembers what it made of tensors like these.

        Where a backend would run, its work is the kernel's: one pass.
        """
        if self._inside:
            return run()
        key = None if torch.is_grad_enabled() else _key(name, backend, given)
        known = _known.get(key)
        if known is not None:
            self.work += known.work
            self.flops += known.flops
            return _like(known.made, given)
        before = len(self.work), self.flops, len(self.calls)
        result = self._run(name, backend, run, given)
        if key is not None and len(self.calls) == before[2]:
            made = _described(result, given)
            if made is not None:
                if len(_known) >= MOST_KNOWN:
                    _known.clear()
                _known[key] = _Known(made, tuple(self.work[before[0] :]), self.flops - before[1])
        return result

    def _run(self, name: str, backend: str, run: Callable[[], Any], given: Any) -> Any:
        if backend == "torch":
            return run()
        before = self.flops
        self._inside += 1
        try:
            result = run()
        finally:
            self._inside -= 1
        read, written = moved(given, result)
        if not written:  # in place
            read = written = sum(sizes(tensors_in(result)).values())
        label = next((f"{name}.{value}" for value in given if isinstance(value, str)), name)
        self.work.append(Work(label, backend, _dtype(given), read, written, self.flops - before))
        return result


class _Known(NamedTuple):
    """What a kernel makes of some kind of tensors: places in `given`, or shapes; and its work."""

    made: Any
    work: tuple[Work, ...]
    flops: int


class _New(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


#: Kernel calls that are remembered: to run a body without data takes 100 us and more, and most blocks repeat.
MOST_KNOWN = 4096
_known: dict[Any, _Known] = {}


def _key(name: str, backend: str, given: Sequence[Any]) -> tuple | None:
    """What decides what a kernel returns; `None` where that cannot be told."""
    key: list[Any] = [name, backend]
    storages: dict[int, int] = {}
    for value in given:
        if isinstance(value, Tensor):
            storage = storages.setdefault(_torch.storage_id(value), len(storages))
            key += [_description(value), storage, value.storage_offset(), value.untyped_storage().nbytes()]
        elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
            key += [type(value), value]
        else:
            return None
    return tuple(key)


def _description(tensor: Tensor) -> _New:
    return _New(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _described(result: Any, given: Sequence[Any]) -> Any:
    """A result in words that `_like` reads; `None` if it cannot be: something else than fresh tensors and arguments."""
    if isinstance(result, tuple):
        parts = [_described(value, given) for value in result]
        return None if None in parts else ("tuple", *parts)
    if result is None:
        return ("none",)
    if not isinstance(result, Tensor):
        return None
    for place, value in enumerate(given):
        if value is result:
            return ("given", place)
    storage = _torch.storage_id(result)
    old = any(isinstance(value, Tensor) and _torch.storage_id(value) == storage for value in given)
    return None if old or result.storage_offset() else ("new", _description(result))


def _like(made: Any, given: Sequence[Any]) -> Any:
    kind, *parts = made
    if kind == "tuple":
        return tuple([_like(part, given) for part in parts])
    if kind == "none":
        return None
    return (
        given[parts[0]]
        if kind == "given"
        else torch.empty_strided(parts[0].shape, parts[0].stride, dtype=parts[0].dtype, device=parts[0].device)
    )


def _operator_bytes(func: Any, name: str, args: Any, options: dict[str, Any], result: Any) -> tuple[int, int]:
    if not func._schema.is_mutable:
        return moved((args, options), result)
    given = args[1:] if name in _OVERWRITE else args
    read = sizes(tensors_in((given, {key: value for key, value in options.items() if key != "out"})))
    return sum(read.values()), sum(sizes(tensors_in(result)).values())


def _dtype(value: Any) -> torch.dtype:
    return next((tensor.dtype for tensor in tensors_in(value)), torch.float32)


@contextmanager
def _metered(device: str) -> Iterator[tuple[Meter, list[tuple[str, str]]]]:
    meter = Meter()
    with meter, record_calls(device, meter.kernel) as calls:
        meter.calls = calls
        yield meter, calls


def cost_of(given: Any, made: Any, meter: Meter | None = None) -> Cost:
    """The cost of a step that took `given` and returned `made`, with what was metered inside it."""
    read, written = moved(given, made)
    return Cost(read, written, meter.flops if meter else 0, tuple(meter.work) if meter else ())


def watched(function: Callable[..., Any], device: str, note: Callable[[Ran], None]) -> Callable[..., Any]:
    """A step's function, to be called with tensors without data: hands what it did to `note`."""

    def run(*args: Any, **into: Any) -> Any:
        with _metered(device) as (meter, calls):
            result = function(*args, **into)
        kernels = tuple(f"{name} ({backend})" for name, backend in calls)
        note(Ran(kernels, _specs(args), _specs(result), cost_of(args, result, meter)))
        return result

    return run


def _specs(value: Any) -> tuple[Spec, ...]:
    return tuple(Spec(tuple(t.shape), t.dtype, t.device) for t in tensors_in(value))


# -- time --------------------------------------------------------------------------------------------------------------


def predict(cost: Cost, machine: Calibration) -> float:
    """Seconds that a step takes: its parts one after another, each bound by memory or by arithmetic."""
    return machine.overhead + sum(_seconds(work, machine) for work in cost.work)


def floor(cost: Cost, machine: Calibration) -> float:
    """Seconds that a step takes at least: what enters and leaves copied once into memory used before, or its products
    alone, whichever is more."""
    products = sum(work.flops / machine.product_rate(work.dtype, work.flops) for work in cost.work if work.flops)
    return max(cost.bytes / machine.memory_rate(cost.bytes) if cost.bytes else 0.0, products)


def _seconds(work: Work, machine: Calibration) -> float:
    moving = work.bytes / machine.memory_rate(work.bytes, fresh=work.backend == "torch")
    if work.flops:
        return max(moving, work.flops / machine.product_rate(work.dtype, work.flops))
    return moving * machine.factor(work.key, work.dtype)
