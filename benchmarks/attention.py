"""Rotary positions alone, and an attention block, against plain PyTorch.

    python benchmarks/attention.py [--rounds 15] [--threads 2]

Rotary: 8 x 512 tokens, 8 heads of 64, against the formula of Hugging Face's `apply_rotary_pos_emb`. The block: norm,
packed projection, rotary, causal attention, projection, residual, against the same with
`torch.nn.functional.scaled_dot_product_attention`. Then attention alone, on a packed stream. float32, forward and
backward; medians of interleaved rounds in milliseconds, and the ratio eager / fusible.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusible
from fusible import ops

HEADS, SIZE = 8, 64
WIDTH = HEADS * SIZE


def angles(length: int) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    both = torch.cat((torch.arange(length)[:, None] * frequencies,) * 2, -1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class EagerBlock(nn.Module):
    """The block as it is usually written."""

    def __init__(self, length: int, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kv_heads) * SIZE, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.cos, self.sin = angles(length)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, SIZE)).transpose(1, 2)
        q, k, v = heads.split((HEADS, self.kv_heads, self.kv_heads), 1)
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != HEADS)
        return x + self.out(y.transpose(1, 2).flatten(2))


def fused_block(eager: EagerBlock) -> fusible.Sequential:
    kv = eager.kv_heads
    block = fusible.Sequential(
        ops.Residual(
            ops.RMSNorm(WIDTH, eps=1e-6), ops.Linear(WIDTH, (HEADS + 2 * kv) * SIZE, bias=False),
            ops.Rotary(SIZE, HEADS + kv), ops.Attention(HEADS, kv, causal=True), ops.Linear(WIDTH, WIDTH, bias=False),
        )
    )  # fmt: skip
    weights = [eager.norm.weight, eager.qkv.weight, eager.out.weight]
    for mine, theirs in zip(block.parameters(), weights, strict=True):
        mine.data = theirs.data.clone()
    return block


def eager_attention(x: Tensor) -> Tensor:
    q, k, v = x.unflatten(-1, (-1, SIZE)).transpose(1, 2).chunk(3, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def step(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, parameters: list[Tensor]) -> float:
    start = time.perf_counter()
    torch.autograd.grad(function(x), [x, *parameters], dy)
    return (time.perf_counter() - start) * 1e3


def compare(title: str, eager: Callable, fused: Callable, x: Tensor, rounds: int) -> None:
    x = x.requires_grad_()
    y, z = eager(x), fused(x)
    error = (y - z).abs().max().item()
    dy = torch.randn(y.shape)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 2):
        for function, found in zip((eager, fused), times, strict=True):
            parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
            spent = step(function, x, dy, parameters)
            if number >= 2:
                found.append(spent)
    a, b = (statistics.median(found) for found in times)
    print(f"{title:44}{a:9.2f}{b:9.2f}{a / b:8.2f}   largest difference {error:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{'':44}{'eager':>9}{'fusible':>9}{'ratio':>8}   (ms; {torch.get_num_threads()} threads)")
    cos, sin = angles(512)

    def by_heads(x: Tensor) -> Tensor:
        return rotate(x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2), cos, sin).transpose(1, 2).flatten(2)

    rotary = fusible.Sequential(ops.Rotary(SIZE, HEADS))
    compare("rotary, 8 x 512, 8 heads of 64", by_heads, rotary, torch.randn(8, 512, WIDTH), options.rounds)
    for batch, length in ((2, 512), (8, 128), (1, 2048)):
        alone = fusible.Sequential(ops.Attention(HEADS, causal=True))
        name = f"attention alone, {batch} x {length}"
        compare(name, eager_attention, alone, torch.randn(batch, length, 3 * WIDTH), options.rounds)
        for kv_heads in (8, 2):
            eager = EagerBlock(length, kv_heads)
            name = f"attention block, {batch} x {length}, {kv_heads} key heads"
            compare(name, eager, fused_block(eager), torch.randn(batch, length, WIDTH), options.rounds)


if __name__ == "__main__":
    main()
