"""Does checking leaf-ness cost less than always detaching? The question left open in TransformerEngine's fuser.

    python benchmarks/leafness.py

Times, per output, what a fuser may do before it hands a result out. Nanoseconds, medians of interleaved rounds on one
thread.
"""

from __future__ import annotations

import statistics
import timeit

import torch

from fusible._torch import shares_memory

CALLS = 20000


def main() -> None:
    torch.set_num_threads(1)
    leaf = torch.randn(8, 64, requires_grad=True)
    y, x = (leaf * 2).detach(), torch.randn(8, 64)
    cases = {
        "y.is_leaf": "y.is_leaf",
        "y.requires_grad and not y.is_leaf": "y.requires_grad and not y.is_leaf",
        "y is x (identity)": "y is x",
        "shares_memory(y, x)": "shares_memory(y, x)",
        "y.detach()": "y.detach()",
        "y.view_as(y)": "y.view_as(y)",
        "y.clone()": "y.clone()",
    }
    names = {"y": y, "x": x, "shares_memory": shares_memory}
    found: dict[str, list[float]] = {label: [] for label in cases}
    for _ in range(15):
        for label, code in cases.items():
            found[label].append(timeit.timeit(code, globals=names, number=CALLS) / CALLS * 1e9)
    for label, times in found.items():
        print(f"{label:36}{statistics.median(times):8.0f} ns")


if __name__ == "__main__":
    main()
