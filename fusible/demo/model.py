"""The model of the demo, a small GPT on characters, written twice: with `torch.nn`, and as one chain of fusible's ops.

Both have the same state-dict keys, so the weights of one load into the other.

b: sequences, t: characters, d: width, h: heads, v: vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusible
from fusible import ops
from fusible.demo.config import CONTEXT, Config
from fusible.sampling import Sampler

__all__ = ["MODELS", "fusible_model", "generate", "plain_model"]


class CausalAttention(nn.Module):
    """Softmax attention over earlier positions."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, qkv: Tensor) -> Tensor:
        b, t, _ = qkv.shape
        q, k, v = qkv.view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each [b, h, t, d / h]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(b, t, -1)  # [b, t, d]


class Residual(nn.Sequential):
    """`x + f(x)`, as plain torch.nn would have it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Positions(nn.Module):
    """`x + weight[:t]`, a learned vector for each position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(waves(CONTEXT, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[1]]


class PlainModel(nn.Sequential):
    """From characters and those that follow, both [b, t], to the mean loss."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = super().forward(tokens)  # [b, t, v]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_block(width: int, heads: int) -> list[nn.Module]:
    attention = [nn.RMSNorm(width), nn.Linear(width, 3 * width), CausalAttention(heads), nn.Linear(width, width)]
    mlp = [nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return [Residual(*attention), Residual(*mlp)]


def fusible_block(width: int, heads: int) -> list[nn.Module]:
    attention = [
        ops.RMSNorm(width), ops.Linear(width, 3 * width), ops.Attention(heads, causal=True), ops.Linear(width, width)
    ]  # fmt: skip
    mlp = [ops.RMSNorm(width), ops.Linear(width, 4 * width), ops.GELU(), ops.Linear(4 * width, width)]
    return [ops.Residual(*attention), ops.Residual(*mlp)]


def waves(t: int, d: int) -> Tensor:
    """Positions as sines of falling frequency, `[t, d]`: attention soon learns to look back from there."""
    frequency = 1.5 * t ** -torch.linspace(0, 1, d)
    phase = torch.arange(d) % 2 * (torch.pi / 2)
    return torch.sin(torch.arange(t)[:, None] * frequency + phase)


def plain_model(vocabulary: int, config: Config) -> PlainModel:
    width = config.width
    blocks = [module for _ in range(config.layers) for module in plain_block(width, config.heads)]
    head = [nn.RMSNorm(width), nn.Linear(width, vocabulary)]
    return PlainModel(nn.Embedding(vocabulary, width), Positions(width), *blocks, *head)


def fusible_model(vocabulary: int, config: Config) -> fusible.Sequential:
    """The whole model as one chain, which ends in the loss: the logits are never there as a whole."""
    width = config.width
    blocks = [module for _ in range(config.layers) for module in fusible_block(width, config.heads)]
    head = [ops.RMSNorm(width), ops.LinearCrossEntropy(width, vocabulary, bias=True)]
    return fusible.Sequential(ops.Embedding(vocabulary, width), ops.PositionEmbedding(CONTEXT, width), *blocks, *head)


#: The two variants by the names under which they are reported.
MODELS = {"torch.nn": plain_model, "fusible": fusible_model}


def generate(model: fusible.Sequential, tokens: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Continues `tokens`, `[t]`, by `length` characters drawn from the model, a little below its own temperature."""
    sampler = Sampler(model)
    return sampler.generate(tokens[None], length, temperature=0.8, context=CONTEXT, generator=generator)[0]
