"""A whole decoder, forward and backward, against the same in plain PyTorch, eager and compiled.

    python benchmarks/decoder.py [--rounds 8] [--no-compile]

Times are medians of interleaved rounds, as installed; peak memory is what a process adds over its weights, inputs and
gradients, each variant in a process of its own. Losses are printed too.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusible
from fusible import ops
from fusible.demo.worker import PeakMemory

#: (layers, width, hidden, heads, vocabulary, batch, length)
SIZES = {"demo": (4, 128, 512, 4, 96, 16, 64), "large": (6, 384, 1024, 6, 32000, 2, 512)}


def make(size: tuple[int, ...]) -> fusible.Sequential:
    layers, d, f, h, v, _, _ = size
    torch.manual_seed(0)

    def layer() -> list[nn.Module]:
        return [
            ops.Residual(ops.RMSNorm(d), ops.Linear(d, 3 * d, bias=False), ops.Rotary(d // h, heads=2 * h),
                         ops.Attention(h, causal=True), ops.Linear(d, d, bias=False)),
            ops.Residual(ops.RMSNorm(d), ops.Linear(d, 2 * f, bias=False), ops.SwiGLU(), ops.Linear(f, d, bias=False)),
        ]  # fmt: skip

    body = [op for _ in range(layers) for op in layer()]
    return fusible.Sequential(ops.Embedding(v, d), *body, ops.RMSNorm(d), ops.LinearCrossEntropy(d, v))


def plain(model: fusible.Sequential, size: tuple[int, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    """The same on the same weights, as PyTorch has it."""
    _, d, _, h, _, _, t = size
    e = d // h
    angles = torch.arange(t)[:, None] * 10000.0 ** (-torch.arange(0, e, 2) / e)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        embedding, *blocks, norm, head = model
        x = F.embedding(tokens, embedding.weight)
        for attention, mlp in zip(blocks[::2], blocks[1::2], strict=True):
            y = F.linear(F.rms_norm(x, (d,), attention[0].weight), attention[1].weight)
            q, k, v = y.unflatten(-1, (3 * h, e)).transpose(1, 2).chunk(3, 1)
            y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
            x = x + F.linear(y.transpose(1, 2).flatten(2), attention[4].weight)
            a, b = F.linear(F.rms_norm(x, (d,), mlp[0].weight), mlp[1].weight).chunk(2, -1)
            x = x + F.linear(F.silu(a) * b, mlp[3].weight)
        logits = F.linear(F.rms_norm(x, (d,), norm.weight), head.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return run


def variant(name: str, size: tuple[int, ...]) -> Callable[[], None]:
    """A step of forward and backward; gradients are dropped before each."""
    model = make(size)
    *_, v, b, t = size
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(v, (2, b, t), generator=generator)
    run: Callable = model if name == "fusible" else plain(model, size)
    if name == "compiled":
        run = torch.compile(run)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        run(tokens, targets).backward()

    return step


def peak(name: str, key: str) -> None:
    step = variant(name, SIZES[key])
    step()
    memory = PeakMemory()
    step()
    print(memory.peak() or 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        return peak(*options.peak)
    names = ["eager", "fusible"] if options.no_compile else ["eager", "compiled", "fusible"]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, forward and backward")
    for key, size in SIZES.items():
        steps = {name: variant(name, size) for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(2 + options.rounds):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                if turn > 1:
                    times[name].append(time.perf_counter() - start)
        ours = statistics.median(times["fusible"])
        for name in names:
            median = statistics.median(times[name])
            command = [sys.executable, __file__, "--peak", name, key]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            memory = int(done.stdout.split()[-1]) / 2**20
            print(f"{key:6} {name:9} {1e3 * median:8.1f} ms  {median / ours:5.2f} of ours   peak {memory:7.1f} MiB")
    return None


if __name__ == "__main__":
    main()
