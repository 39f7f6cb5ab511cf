"""`profile`: the time of each step of a block, measured, beside what a copy of its bytes would take."""

from __future__ import annotations

import html
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fusible import executable
from fusible.explanation import show_bytes
from fusible.ops import BasicLinear
from fusible.plan import Step
from fusible.sequential import Sequential

__all__ = ["Profile", "StepTime", "profile"]

#: Calls before any is timed.
WARM_UP = 3
#: Bytes of the tensor whose copy tells how fast memory is.
COPIED = 1 << 25


@dataclass(frozen=True)
class StepTime:
    """One step of one pass.

    Attributes:
        seconds: the median time of its function.
        bytes: of the tensors that it takes and makes, each memory once.
        copies: its time over that of a copy that moves as many bytes; `None` for a step with a matrix product, which is
        bound by arithmetic.
    """

    direction: str
    ops: str
    rule: str
    kernels: str
    seconds: float
    bytes: int
    copies: float | None


@dataclass(frozen=True)
class Profile:
    """Where the time of a block goes, for one kind of call. `str()` gives a table; in a notebook it shows as one.

    Attributes:
        forward, backward: the block's own median times in seconds, with no step timed; backward is 0 without gradients.
        steps: in the order in which they run.
        copy_rate: bytes read and written per second by a copy of a large tensor, on as many threads.
    """

    title: str
    steps: tuple[StepTime, ...]
    forward: float
    backward: float
    copy_rate: float

    @property
    def overhead(self) -> float:
        """Seconds that are no step's: plan lookup, autograd, what leaves and enters the block."""
        return self.forward + self.backward - sum(step.seconds for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {**asdict(self), "overhead": self.overhead}

    def _rows(self) -> list[tuple[str, ...]]:
        total = self.forward + self.backward
        rows: list[tuple[str, ...]] = [
            (step.direction, step.ops, step.rule or "-", step.kernels, _time(step.seconds),
             f"{100 * step.seconds / total:.0f} %", show_bytes(step.bytes),
             "-" if step.copies is None else f"{step.copies:.1f}")
            for step in self.steps
        ]  # fmt: skip
        rows.append(
            ("", "outside of steps", "", "", _time(self.overhead), f"{100 * self.overhead / total:.0f} %", "", "")
        )
        rows.append(("", "the block", "", "", _time(total), "100 %", "", ""))
        return rows

    _HEADER = ("pass", "ops", "rule", "kernels", "time", "share", "bytes", "copies")

    def __str__(self) -> str:
        cells = [self._HEADER, *self._rows()]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self._HEADER))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        note = f"copies: time over that of a copy of as many bytes, at {self.copy_rate / 1e9:.1f} GB/s"
        return "\n".join([self.title, "", *lines, "", note])

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(line(row, "td") for row in self._rows())
        return f"<h3>{html.escape(self.title)}</h3><table>{line(self._HEADER, 'th')}{body}</table>"


def profile(block: Sequential, *inputs: Tensor, rounds: int = 20, **named: Tensor) -> Profile:
    """Times each step of a block that is one chain, forward and, where gradients are wanted, backward.

    Rounds in which only the whole block is timed alternate with rounds in which each step is; the medians count. Each
    call is a real one: random numbers are drawn, nothing is written to `.grad`.

    Args:
        inputs, named: as for a call; those that require a gradient get one, as the block's parameters do.
        rounds: how many of either kind.

    Raises:
        ValueError: the block is more than one chain, or `rounds` is less than 1.
    """
    if rounds < 1:
        raise ValueError(f"profile: rounds must be at least 1, got {rounds}")
    block.single_chain(*inputs, **named)
    part = block.explain(*inputs, **named).parts[0]  # type: ignore[arg-type]
    watch = _Watch()
    wholes: list[tuple[float, float]] = []
    for turn in range(WARM_UP + rounds):
        whole = _call(block, inputs, named)
        with executable.observed(watch.observe):
            _call(block, inputs, named)
        if turn < WARM_UP:
            watch.times.clear()
        else:
            wholes.append(whole)
    rate = copy_rate()
    shown = {("forward", row.ops): row for row in part.forward} | {("backward", row.ops): row for row in part.backward}
    steps = []
    for (direction, ops), times in watch.times.items():
        seconds, size = statistics.median(times), watch.bytes[direction, ops]
        row = shown.get((direction, ops))
        copies = None if (direction, ops) in watch.products or not size else seconds * rate / size
        rule, kernels = (row.rule, row.kernels) if row else ("", "unknown")
        steps.append(StepTime(direction, ops, rule, kernels, seconds, size, copies))
    forward, backward = (statistics.median(times) for times in zip(*wholes, strict=True))
    return Profile(part.title, tuple(steps), forward, backward, rate)


class _Watch:
    """Times and bytes of the steps that run, by pass and ops."""

    def __init__(self) -> None:
        self.times: dict[tuple[str, str], list[float]] = {}
        self.bytes: dict[tuple[str, str], int] = {}
        self.products: set[tuple[str, str]] = set()

    def observe(self, direction: str, step: Step) -> Callable[..., Any]:
        key = direction, ", ".join(f"{node.path} {type(node.op).__name__}" for node in step.nodes)
        if any(type(node.op) is BasicLinear for node in step.nodes):
            self.products.add(key)

        def run(*args: Any, **into: Any) -> Any:
            start = time.perf_counter()
            result = step.function(*args, **into)
            self.times.setdefault(key, []).append(time.perf_counter() - start)
            if key not in self.bytes:
                self.bytes[key] = _bytes((args, _held(result)))
            return result

        return run


def _held(result: Any) -> list[Any]:
    """What an `Out` or `Grads` holds."""
    return [getattr(result, name) for name in type(result).__slots__]


def _bytes(value: Any, seen: set[int] | None = None) -> int:
    """Bytes of the tensors in nested tuples, lists and dictionaries, each address once."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        address = value.data_ptr()
        known = address in seen
        seen.add(address)
        return 0 if known else value.numel() * value.element_size()
    if isinstance(value, dict):
        value = list(value.values())
    return sum(_bytes(part, seen) for part in value) if isinstance(value, (tuple, list)) else 0


def _call(block: Sequential, inputs: Sequence[Tensor], named: dict[str, Tensor]) -> tuple[float, float]:
    """Seconds of one forward, and of its backward."""
    leaves = [t for t in (*inputs, *named.values(), *block.parameters()) if t.requires_grad]
    start = time.perf_counter()
    outs = block(*inputs, **named)
    middle = time.perf_counter()
    outs = [out for out in (outs if isinstance(outs, tuple) else (outs,)) if out.requires_grad]
    if not outs or not leaves:
        return middle - start, 0.0
    gradients = [torch.ones_like(out) for out in outs]
    again = time.perf_counter()
    torch.autograd.grad(outs, leaves, gradients, allow_unused=True)
    return middle - start, time.perf_counter() - again


def copy_rate() -> float:
    """Bytes per second that a copy of a large tensor reads and writes, at its best of ten."""
    source = torch.ones(COPIED // 4)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(11):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * COPIED / best


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if abs(seconds) >= 1e-3 else f"{1e6 * seconds:.0f} us"
