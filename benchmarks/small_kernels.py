"""Where torch's own operators are faster than the C++ kernels, and up to which size.

    python benchmarks/small_kernels.py [--width 64] [--rounds 25] [kernel ...]

For each kernel with both bodies: the time of the C++ body over that of the torch body, at some numbers of elements in
float32, on one thread, the two interleaved. Above 1 torch is faster; `fusible/kernels/cpu/activation.py` lists
up to which size torch's are taken.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from fusible import kernels

SIZES = [1 << power for power in (6, 8, 10, 12, 13, 14, 15, 16, 17)]


def calls(n: int, w: int) -> dict[str, tuple]:
    """The arguments of each kernel for n rows of w."""
    x, dy, wide = torch.randn(n, w), torch.randn(n, w), torch.randn(n, 2 * w)
    g, b, mean, rstd = torch.ones(w), torch.zeros(w), torch.zeros(n, 1), torch.ones(n, 1)
    found: dict[str, tuple] = {
        "rms_norm": (x, g, 1e-6),
        "drms_norm": (dy, x, rstd, g),
        "layer_norm": (x, g, b, 1e-5),
        "dlayer_norm": (dy, x, mean, rstd, g),
        "add_rms_norm": (x, dy, g, 1e-6),
        "drms_norm_add": (dy, x, rstd, g, x),
        "add_layer_norm": (x, dy, g, b, 1e-5),
        "dlayer_norm_add": (dy, x, mean, rstd, g, x),
        "l2_norm": (x, 1e-6),
        "dl2_norm": (dy, x, rstd),
        "gelu_tanh": (x, "tanh"),
        "dgelu_tanh": (dy, x, "tanh"),
        "bias_act": (x, b, "gelu"),
        "dact_dbias": (dy, x, "gelu"),
        "bias_gated": (wide, torch.zeros(2 * w), "swiglu"),
        "dgated_dbias": (dy, wide, "swiglu"),
    }
    for act in ("gelu", "qgelu", "relu", "srelu", "silu", "sigmoid", "tanh"):
        found |= {act: (x,), f"d{act}": (dy, x)}
    for act in ("swiglu", "geglu", "qgeglu", "reglu", "sreglu", "glu", "clamped_swiglu", "situ_glu"):
        found |= {act: (wide,), f"d{act}": (dy, wide)}
    return found


def ratio(fast: Callable, plain: Callable, arguments: tuple, rounds: int) -> float:
    """The median of (time of `fast` / time of `plain`), one right after the other."""
    number = max(5, min(100, (1 << 20) // arguments[0].numel()))
    found = []
    for _ in range(rounds + 2):
        times = []
        for run in (fast, plain):
            start = time.perf_counter()
            for _ in range(number):
                run(*arguments)
            times.append(time.perf_counter() - start)
        found.append(times[0] / times[1])
    return statistics.median(found[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", help="names; all if none is given")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'elements':16}" + "".join(f"{size:>8}" for size in SIZES) + "   C++ / torch")
    with torch.no_grad():
        for name in calls(1, 64):
            if options.kernels and name not in options.kernels:
                continue
            kernel = kernels.registry.KERNELS[name.removesuffix("_tanh")]
            fast = kernel.choose("cpu", torch.float32, options.width)
            if fast is None:
                raise SystemExit("there are no C++ kernels here; run: python -m fusible build")
            cells = []
            for size in SIZES:
                arguments = calls(max(1, size // options.width), min(options.width, size))[name]
                cells.append(ratio(fast.body, kernel.body, arguments, options.rounds))
            print(f"{name:16}" + "".join(f"{cell:8.2f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
