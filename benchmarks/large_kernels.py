"""How near the C++ kernels come to the speed of memory.

    python benchmarks/large_kernels.py [--rows 4096] [--width 2048] [--rounds 40]

For each kernel: its best time, float32, and how many times what a copy of as many bytes as it must move takes. The
kernels and the copy are interleaved; the best of all rounds counts, as what disturbs only ever adds.
"""

from __future__ import annotations

import argparse
import time

import torch

from fusible import kernels
from fusible.kernels import library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rows", 4096), ("width", 2048), ("rounds", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if not library.load():
        raise SystemExit(f"the C++ kernels are {library.why_not()}")
    n, w = options.rows, options.width
    x, other, dy, out = (torch.randn(n, w) for _ in range(4))
    gain, shift, wide = torch.randn(w), torch.randn(w), torch.randn(n, 2 * w)
    _, mean, rstd = kernels.layer_norm(x, gain, shift, 1e-5)
    runs = {  # how many [n, w] tensors each must read and write
        "copy": (2, lambda: out.copy_(x)),
        "rms_norm": (2, lambda: kernels.rms_norm(x, gain, 1e-5)),
        "drms_norm": (3, lambda: kernels.drms_norm(dy, x, rstd, gain)),
        "layer_norm": (2, lambda: kernels.layer_norm(x, gain, shift, 1e-5)),
        "dlayer_norm": (3, lambda: kernels.dlayer_norm(dy, x, mean, rstd, gain)),
        "add_rms_norm": (4, lambda: kernels.add_rms_norm(x, other, gain, 1e-5)),
        "drms_norm_add": (4, lambda: kernels.drms_norm_add(dy, x, rstd, gain, other)),
        "dropout_add_norm": (4, lambda: kernels.dropout_add_norm(x, other, 0.1, gain, shift, 1e-5)),
        "swiglu": (3, lambda: kernels.swiglu(wide)),
        "dswiglu": (5, lambda: kernels.dswiglu(dy, wide)),
        "gelu": (2, lambda: kernels.gelu(x)),
        "bias_act gelu": (3, lambda: kernels.bias_act(x, shift, "gelu")),
        "dact_dbias gelu": (3, lambda: kernels.dact_dbias(dy, x, "gelu")),
        "dact_recompute gelu": (4, lambda: kernels.dact_recompute(dy, x, "gelu")),
    }
    best = dict.fromkeys(runs, float("inf"))
    with torch.no_grad():
        for _ in range(options.rounds):
            for name, (_, run) in runs.items():
                run()
                start = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - start)
    stream = best["copy"] / 2
    for name, (streams, _) in runs.items():
        print(f"{name:20} {1e3 * best[name]:8.2f} ms {best[name] / stream / streams:6.2f} copies of its bytes")


if __name__ == "__main__":
    main()
