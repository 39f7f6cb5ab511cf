"""What the first touch of memory costs: of the allocator's blocks, in huge pages if there are any, and torch's.

    python benchmarks/fresh_memory.py [--mib 32]

Each line fills memory that is new to the process, then the same memory again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fusible.kernels import library


def filled(make: Callable[[], Tensor]) -> tuple[float, float]:
    """Milliseconds of the first fill and of the second."""
    times = []
    tensor = make()
    for _ in range(2):
        start = time.perf_counter()
        tensor.fill_(1.0)
        times.append(1e3 * (time.perf_counter() - start))
    held.append(tensor)
    return times[0], times[1]


held: list[Tensor] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=32)
    elements = parser.parse_args().mib << 18
    if not library.load():
        raise SystemExit(f"the C++ kernels are {library.why_not()}")
    for turn in range(4):
        ours = filled(lambda: torch.ops.fusible.empty.default([elements], torch.float32))
        theirs = filled(lambda: torch.empty(elements))
        print(f"{turn + 1}: fusible {ours[0]:7.1f} ms, again {ours[1]:5.1f}", end="; ")
        print(f"torch {theirs[0]:7.1f} ms, again {theirs[1]:5.1f}")


if __name__ == "__main__":
    main()
