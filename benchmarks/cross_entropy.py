"""Cross entropy, alone and behind a linear layer: time and peak memory, forward and backward, float32.

    python benchmarks/cross_entropy.py [--tokens 2048] [--width 512] [--classes 32000] [--rounds 7]

First the loss alone, on logits that are there; then with the linear layer, against plain PyTorch and
`torch.nn.functional.linear_cross_entropy` with and without its chunks, where this PyTorch has it. `floor` is the three
matrix products alone, as one piece each. Times are medians of interleaved rounds, and the best of them. Peak memory is
what a process holds at most above inputs, parameters and their gradients, as the system counts it (Linux), in percent
of the logits.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

import fusible
from fusible import ops

LOSS = ("eager", "fusible")
LINEAR = ("floor", "eager", "torch", "torch chunked", "fusible", "fusible, two ops")


def main() -> None:
    options = parsed()
    if options.peak:
        print(peak(options))
        return
    torch.set_num_threads(os.cpu_count() or 1)
    print(f"{options.tokens} tokens, width {options.width}, {options.classes} classes, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}")  # fmt: skip
    for title, names in (("loss alone", LOSS), ("linear layer and loss", LINEAR)):
        alone = title == "loss alone"
        runs = {name: run for name in names if (run := made(name, alone, options))}
        times = measured(runs, options.rounds)
        print(f"\n{title:28} {'time':>10} {'best':>10} {'eager/this':>10} {'peak':>8}")
        for name, taken in times.items():
            middle = statistics.median(taken)
            ratio = statistics.median(times["eager"]) / middle
            memory = peak_in_a_process(name, alone)
            print(f"{name:28} {1e3 * middle:7.0f} ms {1e3 * min(taken):7.0f} ms {ratio:10.2f} {memory:>8}", flush=True)
        del runs


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 2048), ("width", 512), ("classes", 32000), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--peak", choices=[*LOSS, *LINEAR], help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def made(name: str, alone: bool, options: argparse.Namespace) -> Callable[[], object] | None:
    """One forward and backward; `None` where this PyTorch lacks it."""
    n, d, v = options.tokens, options.width, options.classes
    torch.manual_seed(0)
    target = torch.randint(0, v, (n,))
    if alone:
        logits = torch.randn(n, v).requires_grad_()
        loss = fusible.Sequential(ops.CrossEntropy()) if name == "fusible" else F.cross_entropy
        return lambda: torch.autograd.grad(loss(logits, target), logits)
    x, weight = torch.randn(n, d, requires_grad=True), torch.nn.Parameter(torch.randn(v, d) / d**0.5)
    torchs = getattr(F, "linear_cross_entropy", None)
    if name == "floor":
        return lambda: products(x.detach(), weight.detach())
    if name.startswith("torch") and torchs is None:
        return None
    if name == "torch":
        return lambda: torch.autograd.grad(torchs(x, weight, target), (x, weight))
    if name == "torch chunked":
        chunks = torch.nn.LinearCrossEntropyOptions()
        return lambda: torch.autograd.grad(torchs(x, weight, target, options=chunks), (x, weight))
    if name == "eager":
        return lambda: torch.autograd.grad(F.cross_entropy(F.linear(x, weight), target), (x, weight))
    two = [ops.BasicLinear(d, v), ops.CrossEntropy()]
    block = fusible.Sequential(*two if name.endswith("two ops") else [ops.LinearCrossEntropy(d, v)])
    block[0].weight = weight
    return lambda: torch.autograd.grad(block(x, target), (x, weight))


def products(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = x @ weight.t()
    return logits @ weight, logits.t() @ x


def measured(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def peak_in_a_process(name: str, alone: bool) -> str:
    if not pathlib.Path("/proc/self/clear_refs").exists():
        return "unknown"
    command = [sys.executable, *sys.argv, "--peak", name, *(["--alone"] if alone else [])]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def peak(options: argparse.Namespace) -> str:
    small = argparse.Namespace(**{**vars(options), "tokens": 64, "classes": 512})
    warm_up, run = (made(options.peak, options.alone, given) for given in (small, options))
    assert warm_up is not None
    assert run is not None
    warm_up()  # code that is loaded once
    before = resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    gradients = run()
    assert isinstance(gradients, tuple)
    held = sum(gradient.nbytes for gradient in gradients)
    return f"{100 * (resident('VmHWM') - before - held) / (4 * options.tokens * options.classes):.1f} %"


def resident(field: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


if __name__ == "__main__":
    main()
