"""Measures what `fusible.calibration` stores: how fast this machine copies, multiplies and runs our kernels."""

from __future__ import annotations

import datetime
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fusible import calibration, executable, ops
from fusible.calibration import Calibration, Curve
from fusible.costs import Work
from fusible.dry_run import dry_run
from fusible.sequential import Sequential

__all__ = ["calibrate", "tasks"]

#: Bytes moved by the copies that are timed; what a step keeps in a cache goes faster than what it must fetch.
COPIES = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)
#: Sides of the square matrices that are multiplied.
SIDES = (64, 128, 256, 512, 1024, 2048)
PRODUCT_DTYPES = (torch.float32, torch.bfloat16)
DTYPES = (torch.float32, torch.bfloat16)
#: Rows and width of what the kernels work on: far more than a cache holds.
ROWS, WIDTH = 4096, 2048
#: A measurement goes on until it has taken so many seconds, or so many runs.
SECONDS, MOST_RUNS = 0.25, 60


def _blocks() -> list[tuple[str, Callable[[], list[Any]]]]:
    """Blocks whose steps run each family's kernels alone, both ways."""
    gated = (ops.SwiGLU, ops.GEGLU, ops.QGEGLU, ops.ReGLU, ops.GLU)
    acts = (ops.GELU, ops.QGELU, ops.ReLU, ops.SReLU, ops.SiLU, ops.Sigmoid, ops.Tanh)
    return [
        ("norms", lambda: [ops.RMSNorm(WIDTH), ops.LayerNorm(WIDTH)]),
        ("norms in residual branches", lambda: [ops.Residual(ops.RMSNorm(WIDTH)), ops.Residual(ops.LayerNorm(WIDTH))]),
        *[(act.__name__, lambda act=act: [act(), ops.Bias(WIDTH), act()]) for act in acts],
        *[(act.__name__, lambda act=act: [act()]) for act in gated],
        ("gated with bias", lambda: [ops.Bias(WIDTH), ops.SwiGLU()]),
        ("dropout", lambda: [ops.Dropout(0.1), ops.Residual(ops.Dropout(0.1)), ops.LayerNorm(WIDTH)]),
    ]


def tasks() -> list[tuple[str, Callable[[dict[str, Any]], None]]]:
    """What is measured, in order: (what, function that adds it to the results)."""
    found: list[tuple[str, Callable[[dict[str, Any]], None]]] = []
    for size in COPIES:
        found.append(("copies", functools.partial(_add_copies, moved=size)))
    for dtype in PRODUCT_DTYPES:
        for side in SIDES:
            found.append(("matrix products", functools.partial(_add_product, dtype=dtype, side=side)))
    found.append(("overhead of a step", _add_overhead))
    for name, make in _blocks():
        for dtype in DTYPES:
            found.append((f"kernels: {name}", functools.partial(_add_factors, make=make, dtype=dtype)))
    return found


def calibrate(progress: Callable[[str], None] = lambda what: None) -> Calibration:
    """Measures this machine, in about half a minute; `progress` is told what comes next. Keep the machine quiet."""
    results: dict[str, Any] = {"reused": [], "fresh": [], "products": {}, "factors": {}}
    for what, run in tasks():
        progress(what)
        run(results)
    return Calibration(
        calibration.machine(),
        datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        tuple(results["reused"]),
        tuple(results["fresh"]),
        {name: tuple(points) for name, points in results["products"].items()},
        {name: {dtype: statistics.median(found) for dtype, found in by_dtype.items()}
         for name, by_dtype in sorted(results["factors"].items())},
        results["overhead"],
    )  # fmt: skip


def _typical(times: list[float]) -> float:
    """The lower quartile: what a run takes when nothing else wants the processor."""
    return sorted(times)[len(times) // 4]


def _seconds(function: Callable[[], Any]) -> float:
    """Seconds of one run, the first two left out."""
    times: list[float] = []
    function()
    begin = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begin < SECONDS and len(times) < MOST_RUNS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return _typical(times[1:])


def _add_copies(results: dict[str, Any], moved: int) -> None:
    """A copy into memory used before, and an addition into a fresh allocation; both move `moved` bytes."""
    source = torch.ones(moved // 8)
    target = torch.ones_like(source)
    results["reused"].append((moved, moved / _seconds(lambda: target.copy_(source))))
    results["fresh"].append((moved, moved / _seconds(lambda: source + 1)))


def _add_product(results: dict[str, Any], dtype: torch.dtype, side: int) -> None:
    left, right, out = (torch.ones(side, side, dtype=dtype) for _ in range(3))
    flops = 2 * side**3
    curve: list[tuple[float, float]] = results["products"].setdefault(str(dtype).removeprefix("torch."), [])
    curve.append((flops, flops / _seconds(lambda: torch.mm(left, right, out=out))))


def _add_overhead(results: dict[str, Any]) -> None:
    """A step on a tensor of a few elements is all overhead."""
    results["overhead"] = min(seconds for _, seconds in _steps(lambda: [ops.ReLU()], torch.float32, 1, 8))


def _add_factors(results: dict[str, Any], make: Callable[[], list[Any]], dtype: torch.dtype) -> None:
    """For each step that is one kernel: its time over that of a copy of as many bytes."""
    curves: dict[str, Curve] = {name: tuple(results[name]) for name in ("reused", "fresh")}
    rates = Calibration({}, "", curves["reused"], curves["fresh"], {}, {}, 1e-9)
    for work, seconds in _steps(make, dtype, ROWS, WIDTH):
        copied = work.bytes / rates.memory_rate(work.bytes, fresh=work.backend == "torch")
        found = results["factors"].setdefault(work.key, {}).setdefault(str(work.dtype).removeprefix("torch."), [])
        found.append(max(seconds - results["overhead"], 1e-9) / copied)


def _steps(make: Callable[[], list[Any]], dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Work, float]]:
    """The work and seconds of each step of a block, in both passes, that is one kernel without products."""
    block = Sequential(*make()).to(dtype)
    x = torch.ones(rows, width, dtype=dtype, requires_grad=True)
    times: dict[Any, list[float]] = {}

    def observe(direction: str, step: Any) -> Callable[..., Any]:
        def run(*args: Any, **into: Any) -> Any:
            start = time.perf_counter()
            result = step.function(*args, **into)
            times.setdefault(step, []).append(time.perf_counter() - start)
            return result

        return run

    y = block(x)
    dy = torch.ones_like(y)
    y.backward(dy)
    begin = time.perf_counter()
    with executable.observed(observe):
        while not times or (time.perf_counter() - begin < 2 * SECONDS and len(next(iter(times.values()))) < MOST_RUNS):
            for _ in range(3):
                torch.autograd.grad(block(x), x, dy)
    fuser, given = block.single_chain(x)
    plan, flat, _ = fuser.find(given, block.rules)
    assert plan is not None
    run = dry_run(plan, [torch.empty(rows, width, dtype=dtype, device="meta")], flat[1:])
    for step, taken in times.items():
        ran = run.forward.get(id(step)) or run.backward.get(id(step))
        if ran is not None and len(ran.cost.work) == 1 and not ran.cost.flops:
            yield ran.cost.work[0], _typical(taken)
