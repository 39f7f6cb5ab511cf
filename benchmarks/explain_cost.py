"""What `explain` costs for a block of about fifty ops, first and later: `python benchmarks/explain_cost.py`."""

from __future__ import annotations

import statistics
import time

import torch

import fusible
from fusible import ops


def block() -> fusible.Sequential:
    def branch() -> ops.Residual:
        return ops.Residual(ops.RMSNorm(512), ops.Linear(512, 1024), ops.SwiGLU(), ops.Linear(512, 512))

    return fusible.Sequential(*[branch() for _ in range(6)])


def main() -> None:
    x = torch.randn(64, 512, requires_grad=True)
    times, again = [], []
    for _ in range(20):
        made = block()  # a plan of its own each time
        start = time.perf_counter()
        made.explain(x)
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
        made.explain(x)
        again.append(time.perf_counter() - start)
    count = len(made.single_chain(x)[0].chain.nodes)
    planned, known = (1e3 * statistics.median(found[1:]) for found in (times, again))
    print(
        f"{count} ops: the process's first {times[0]:.1f} s, a new block {planned:.0f} ms, a planned one {known:.0f} ms"
    )


if __name__ == "__main__":
    main()
