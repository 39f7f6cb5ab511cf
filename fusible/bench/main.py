"""The benchmark from its options to its exit code."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

import fusible
from fusible.bench import report, rows
from fusible.bench.measure import Plan, Probe, measure
from fusible.bench.results import Machine, Report, RowResult
from fusible.demo.config import InputError
from fusible.kernels import library

__all__ = ["Options", "run_bench"]

INTERRUPTED = 130
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Options:
    """What the command line asks for. Raises `InputError` on values that cannot work."""

    words: tuple[str, ...] = ()
    json: Path | None = None
    plot: Path | None = None
    rounds: int = 10
    threads: int | None = None
    compile: bool = True
    sweep: bool = False
    check: bool = False

    def __post_init__(self) -> None:
        for name, value in (("rounds", self.rounds), ("threads", self.threads)):
            if value is not None and value < 1:
                raise InputError(f"--{name} must be at least 1, got {value}")
        if self.plot is not None and self.plot.suffix.lower() not in PICTURES:
            raise InputError(f"--plot {self.plot}: the name must end in one of {', '.join(PICTURES)}")
        for name, path in (("json", self.json), ("plot", self.plot)):
            if path is not None and not path.parent.is_dir():
                raise InputError(f"--{name} {path}: there is no folder {path.parent}")
            if path is not None and path.is_dir():
                raise InputError(f"--{name} {path}: Is a directory")


def run_bench(options: Options, console: Console) -> int:
    """Measures, shows and saves; returns the exit code.

    0: done. 1: a row failed or, with `check`, missed a target. 130: stopped by Ctrl-C; what was measured until then is
    shown and saved.
    """
    chosen = rows.select(options.words, rows.sweep() if options.sweep else rows.ROWS)
    draw = _painter() if options.plot is not None else None
    machine, start = describe_machine(options.threads), time.perf_counter()
    found: list[RowResult] = []
    stopped = False
    with tempfile.TemporaryDirectory(prefix="fusible-bench-", ignore_cleanup_errors=True) as cache:
        variants = rows.VARIANTS if options.compile else tuple(v for v in rows.VARIANTS if v != "compile")
        plan = Plan(options.rounds, options.threads, variants, cache)
        try:
            _measure(chosen, plan, console, found)
        except KeyboardInterrupt:
            stopped = True
    result = Report(machine, tuple(found), time.perf_counter() - start)
    report.show(console, result)
    if options.json is not None:
        options.json.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    if draw is not None and options.plot is not None and found:
        draw(result, options.plot)
    if stopped:
        console.print(f"Stopped after {len(found)} of {len(chosen)} rows.")
        return INTERRUPTED
    return 1 if result.failed or (options.check and result.missed) else 0


def _painter() -> Callable[[Report, Path], None]:
    """Imported before anything is measured: a missing matplotlib is found now."""
    from fusible.bench.chart import draw

    return draw


def _measure(chosen: Iterable[rows.Row], plan: Plan, console: Console, found: list[RowResult]) -> None:
    """Appends one result per row."""
    chosen = tuple(chosen)
    probe = Probe()
    with report.Bar(console, len(chosen)) as bar:
        for row in chosen:
            found.append(measure(row, plan, probe, bar.stage(row.name)))
            bar.done()


def describe_machine(threads: int | None) -> Machine:
    """Versions, CPU and load, before anything runs."""
    info = fusible.info()
    return Machine(
        info.fusible,
        info.torch,
        info.python,
        info.platform,
        f"{_cpu_model()} ({torch.backends.cpu.get_cpu_capability()})",
        threads or torch.get_num_threads(),
        "C++ kernels" if library.load() else "no C++ kernels",
        _load(),
    )


def _load() -> float | None:
    return None if sys.platform == "win32" else os.getloadavg()[0]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
