"""The model of the demo, a small GPT on characters, written twice: with `torch.nn` and with fusible.

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

__all__ = ["MODELS", "CharModel", "fusible_model", "generate", "plain_model"]


class CausalAttention(nn.Module):
    """Softmax attention over earlier positions. A plain module: inside a fusible block it splits the chain."""

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


def plain_block(width: int, heads: int) -> nn.Module:
    attention = [nn.RMSNorm(width), nn.Linear(width, 3 * width), CausalAttention(heads), nn.Linear(width, width)]
    mlp = [nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return nn.Sequential(Residual(*attention), Residual(*mlp))


def fusible_block(width: int, heads: int) -> nn.Module:
    attention = [ops.RMSNorm(width), ops.Linear(width, 3 * width), CausalAttention(heads), ops.Linear(width, width)]
    mlp = [ops.RMSNorm(width), ops.Linear(width, 4 * width), ops.GELU(), ops.Linear(4 * width, width)]
    return fusible.Sequential(ops.Residual(*attention), ops.Residual(*mlp))


class CharModel(nn.Module):
    """Embeddings, then `body`: the blocks, a norm, and the projection to the vocabulary."""

    def __init__(self, vocabulary: int, width: int, body: nn.Sequential) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.body: nn.Sequential = body
        with torch.no_grad():
            self.position.weight.copy_(waves(CONTEXT, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[b, t, v]` of the next character at each position of `tokens`, `[b, t]`."""
        return self.body(self.token(tokens) + self.position.weight[: tokens.shape[1]])


def waves(t: int, d: int) -> Tensor:
    """Positions as sines of falling frequency, `[t, d]`: attention soon learns to look back from there."""
    frequency = 1.5 * t ** -torch.linspace(0, 1, d)
    phase = torch.arange(d) % 2 * (torch.pi / 2)
    return torch.sin(torch.arange(t)[:, None] * frequency + phase)


def plain_model(vocabulary: int, config: Config) -> CharModel:
    blocks = [plain_block(config.width, config.heads) for _ in range(config.layers)]
    head = [nn.RMSNorm(config.width), nn.Linear(config.width, vocabulary)]
    return CharModel(vocabulary, config.width, nn.Sequential(*blocks, *head))


def fusible_model(vocabulary: int, config: Config) -> CharModel:
    blocks = [fusible_block(config.width, config.heads) for _ in range(config.layers)]
    head = [ops.RMSNorm(config.width), ops.Linear(config.width, vocabulary)]
    return CharModel(vocabulary, config.width, fusible.Sequential(*blocks, *head))


#: The two variants by the names under which they are reported.
MODELS = {"torch.nn": plain_model, "fusible": fusible_model}


@torch.no_grad()
def generate(model: CharModel, tokens: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Continues `tokens`, `[t]`, by `length` characters drawn from the model, a little below its own temperature."""
    for _ in range(length):
        logits = model(tokens[None, -CONTEXT:])[0, -1] / 0.8
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn])
    return tokens
