"""Host cost: a five-op block at 4x32 against its torch.nn twin and a hand-written autograd.Function.

    python benchmarks/tiny_block.py [--rounds 60] [--check]

Interleaved rounds on one thread; medians in microseconds and ratios to the twin. With --check the exit code is 1 if
fusible's forward+backward is slower than the twin's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from torch import nn

import fusible
from fusible import ops

ROWS, WIDTH, HIDDEN, CALLS = 4, 32, 64, 60


class Twin(nn.Module):
    """The same block in plain torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x, extra):
        return self.body(x) + extra


class ByHand(torch.autograd.Function):
    """The same block as one Function with the kernels called directly: the floor of what an engine can reach."""

    @staticmethod
    def forward(ctx, x, extra, g, w1, b1, w2, b2):
        k = fusible.kernels
        h, rstd = k.rms_norm(x, g, torch.finfo(x.dtype).eps)
        pre = k.gemm_bias(h, w1, b1)
        a = k.gelu(pre)
        y = k.gemm_bias(a, w2, b2).add_(extra)
        ctx.save_for_backward(x, g, w1, w2)
        ctx.kept = rstd, h, pre, a
        return y

    @staticmethod
    def backward(ctx, dy):
        k = fusible.kernels
        x, g, w1, w2 = ctx.saved_tensors
        rstd, h, pre, a = ctx.kept
        db2, dw2 = k.dbias(dy), k.dgemm_weight(dy, a)
        dpre = k.dgelu(k.dgemm_x(dy, w2), pre)
        db1, dw1 = k.dbias(dpre), k.dgemm_weight(dpre, h)
        dx, dg = k.drms_norm(k.dgemm_x(dpre, w1), x, rstd, g)
        return dx, dy, dg, dw1, db1, dw2, db2


def variants() -> dict[str, object]:
    twin = Twin()
    block = fusible.Sequential(
        ops.RMSNorm(WIDTH), ops.Linear(WIDTH, HIDDEN), ops.GELU(), ops.Linear(HIDDEN, WIDTH), ops.AddExtraInput()
    )
    block.load_state_dict({name.removeprefix("body."): value for name, value in twin.state_dict().items()})
    params = list(twin.body.parameters())
    return {"torch.nn twin": twin, "fusible": block, "by hand": lambda x, extra: ByHand.apply(x, extra, *params)}


def seconds(run, x, extra, mode: str) -> float:
    dy = torch.ones(ROWS, WIDTH)
    start = time.perf_counter()
    for _ in range(CALLS):
        if mode == "no_grad":
            with torch.no_grad():
                run(x, extra)
        elif mode == "forward":
            run(x, extra)
        else:
            run(x, extra).backward(dy)
    return (time.perf_counter() - start) / CALLS


def measure(rounds: int) -> dict[tuple[str, str], float]:
    torch.set_num_threads(1)
    x, extra = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH, requires_grad=True)
    runs = variants()
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 3):
        for mode in ("no_grad", "forward", "forward+backward"):
            for name, run in runs.items():
                time_ = seconds(run, x, extra, mode)
                if number >= 3:  # the first rounds warm up
                    found.setdefault((name, mode), []).append(time_)
    return {key: statistics.median(times) * 1e6 for key, times in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--check", action="store_true", help="exit with 1 if fusible is slower than the twin")
    options = parser.parse_args()
    found = measure(options.rounds)
    print(f"{'':16}{'no_grad':>20}{'forward':>20}{'forward+backward':>20}   (us, ratio to the twin)")
    for name in ("torch.nn twin", "fusible", "by hand"):
        cells = [f"{found[name, m]:.0f} ({found[name, m] / found['torch.nn twin', m]:.2f})"
                 for m in ("no_grad", "forward", "forward+backward")]  # fmt: skip
        print(f"{name:16}" + "".join(f"{cell:>20}" for cell in cells))
    slower = found["fusible", "forward+backward"] > found["torch.nn twin", "forward+backward"]
    if slower:
        print("fusible is slower than the twin")
    return int(slower and options.check)


if __name__ == "__main__":
    sys.exit(main())
