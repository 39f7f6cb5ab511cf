"""What an engine costs on top of one small op: eager, fusible, and a `Function` written by hand, forward and backward.

    python benchmarks/one_op.py [--rows 64] [--width 256] [--rounds 30]

SwiGLU in float32 on one thread. By hand is one `torch.autograd.Function` around the same kernels that looks at nothing:
no plan, no check of what changed, no look at who shares memory. Interleaved; the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fusible
from fusible import kernels, ops


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return kernels.swiglu(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return kernels.dswiglu(dy, *ctx.saved_tensors)


def eager(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rows", 64), ("width", 256), ("rounds", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(options.rows, 2 * options.width, requires_grad=True)
    dy = torch.randn(options.rows, options.width)
    runs: dict[str, Callable[[Tensor], Tensor]] = {
        "eager": eager, "fusible": fusible.Sequential(ops.SwiGLU()), "by hand": ByHand.apply,
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.rounds + 3):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(200):
                torch.autograd.grad(run(x), x, dy)
            if turn >= 3:
                times[name].append((time.perf_counter() - start) / 200)
    first = statistics.median(times["eager"])
    for name, found in times.items():
        middle = statistics.median(found)
        print(f"{name:10} {1e6 * middle:7.1f} us  {first / middle:5.2f} times as fast as eager")


if __name__ == "__main__":
    main()
