"""A decoder as one chain: trained beside the same model in plain PyTorch, explained, and sampled from.

    python examples/gpt.py
    python -m fusible explain examples/gpt.py:model --html gpt.html

Its last line is:

the two agree
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusible
from fusible import ops
from fusible.sampling import Sampler

VOCABULARY, WIDTH, HIDDEN, LAYERS = 97, 128, 344, 2
HEADS, KV_HEADS, HEAD = 4, 2, 32
BATCH, LENGTH = 8, 64


def layer() -> list[nn.Module]:
    return [
        ops.Residual(
            ops.RMSNorm(WIDTH),
            ops.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD, bias=False),
            ops.Rotary(HEAD, heads=HEADS + KV_HEADS),
            ops.Attention(HEADS, KV_HEADS, causal=True),
            ops.Linear(HEADS * HEAD, WIDTH, bias=False),
        ),
        ops.Residual(
            ops.RMSNorm(WIDTH),
            ops.Linear(WIDTH, 2 * HIDDEN, bias=False),
            ops.SwiGLU(),
            ops.Linear(HIDDEN, WIDTH, bias=False),
        ),
    ]


def decoder() -> fusible.Sequential:
    """From tokens and targets to the mean loss. The logits are never there as a whole."""
    layers = [op for _ in range(LAYERS) for op in layer()]
    return fusible.Sequential(
        ops.Embedding(VOCABULARY, WIDTH), *layers, ops.RMSNorm(WIDTH), ops.LinearCrossEntropy(WIDTH, VOCABULARY)
    )


class Plain(nn.Module):
    """The same model as PyTorch has it, on the weights of a decoder."""

    def __init__(self, weights: fusible.Sequential) -> None:
        super().__init__()
        self.weights = weights
        angles = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
        self.cos, self.sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)  # [t, e]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        embedding, *blocks, norm, head = self.weights
        x = F.embedding(tokens, embedding.weight)
        for attention, mlp in zip(blocks[::2], blocks[1::2], strict=True):
            x = x + self.attend(attention, x)
            gate, up = F.linear(self.norm(mlp[0], x), mlp[1].weight).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, mlp[3].weight)
        logits = F.linear(self.norm(norm, x), head.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def attend(self, branch: nn.Sequential, x: Tensor) -> Tensor:
        heads = F.linear(self.norm(branch[0], x), branch[1].weight).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
        q, k = self.rotate(q), self.rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(y.transpose(1, 2).flatten(2), branch[4].weight)

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos[: x.shape[-2]] + torch.cat((-second, first), -1) * self.sin[: x.shape[-2]]

    @staticmethod
    def norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), norm.weight, norm.eps)


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences that count up in steps of their own, and what follows each token."""
    start, step = torch.randint(VOCABULARY, (2, BATCH, 1), generator=generator)
    numbers = (start + step % 5 * torch.arange(LENGTH + 1)) % VOCABULARY
    return numbers[:, :-1], numbers[:, 1:]


def train(model: nn.Module, steps: int = 60) -> tuple[list[float], float]:
    """The loss of each step, and the seconds of all."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    start = time.perf_counter()
    for _ in range(steps):
        loss = model(*batch(generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, time.perf_counter() - start


torch.manual_seed(0)
model = decoder()
example_inputs = batch(torch.Generator().manual_seed(0))


def main() -> None:
    print(model.explain(*example_inputs))
    twin = decoder()
    twin.load_state_dict(model.state_dict())
    fused, seconds = train(model)
    plain, plain_seconds = train(Plain(twin))
    print(f"\nloss {fused[0]:.3f} to {fused[-1]:.3f}, plain PyTorch {plain[0]:.3f} to {plain[-1]:.3f}")
    print(f"seconds: {seconds:.1f}, plain PyTorch {plain_seconds:.1f}")

    tokens = torch.tensor([[3, 5, 7, 9]])
    print("continued:", Sampler(model).generate(tokens, 8, temperature=0)[0].tolist())
    difference = max(abs(a - b) for a, b in zip(fused, plain, strict=True))
    print("the two agree" if difference < 1e-2 else f"the two differ by {difference}")


if __name__ == "__main__":
    main()
