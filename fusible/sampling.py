"""Sampling from a decoder that is one chain: a small path of its own, for inference alone, with a key-value cache.

It shares the chain's modules and so its weights; nothing is copied, and training and sampling may take turns.

b: sequences, t: new tokens, w: width, h, g: query and key heads, e: elements of a head, v: vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusible.op import Op
from fusible.ops import Attention, CrossEntropy, LinearCrossEntropy, PositionEmbedding, Residual, Rotary

__all__ = ["Sampler"]


class Sampler:
    """Runs a decoder token by token, keeping each attention's keys and values.

    Args:
        chain: a `Sequential` that takes tokens, of an `Embedding`, residual blocks with causal `Attention`, and what
            ends it: a `LinearCrossEntropy`, whose weight makes the logits, a `CrossEntropy`, or the layer that makes
            them. Ops between must work position by position.

    Dropout is left out, whatever mode the chain is in. Raises `TypeError` on an op that needs extra inputs, and
    `ValueError` on attention that is not causal.
    """

    def __init__(self, chain: torch.nn.Sequential) -> None:
        self.chain = chain
        self.length = 0
        self.caches: dict[str, tuple[Tensor, Tensor]] = {}
        _check(chain, "")

    def reset(self) -> None:
        """Forgets all tokens."""
        self.length = 0
        self.caches = {}

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [b, v] of what follows `tokens` [b, t], which come behind those of earlier calls."""
        if tokens.dim() != 2 or not tokens.shape[1]:
            raise ValueError(f"Sampler: tokens must be [sequences, at least one], got {list(tokens.shape)}")
        x = self._run(self.chain, tokens, "")
        self.length += tokens.shape[1]
        return x[:, -1]

    def generate(
        self,
        tokens: Tensor,
        length: int,
        *,
        temperature: float = 1.0,
        context: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continues `tokens` [b, t] by `length` tokens that are drawn one by one: [b, t + length].

        Args:
            temperature: what logits are divided by; 0 takes the likeliest token.
            context: the most tokens that the model may look at, as many as it was trained with. When they are used up,
                the cache is made again from the later half.
        """
        self.reset()
        new = tokens if context is None else tokens[:, -context:]
        for _ in range(length):
            if context is not None and self.length + new.shape[1] > context:
                self.reset()
                new = tokens[:, -max(1, context // 2) :]
            logits = self(new)
            if temperature:
                new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                new = logits.argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, new), 1)
        return tokens

    def _run(self, container: torch.nn.Module, x: Tensor, prefix: str) -> Tensor:
        for name, module in container._modules.items():
            x = self._step(module, x, f"{prefix}{name}.")
        return x

    def _step(self, module: Any, x: Tensor, path: str) -> Tensor:
        if isinstance(module, Residual):
            return x + self._run(module, x, path)
        if isinstance(module, torch.nn.Sequential):
            return self._run(module, x, path)
        if isinstance(module, Attention):
            return self._attend(module, x, path)
        if isinstance(module, LinearCrossEntropy):
            logits = F.linear(x, module.weight.to(x.dtype), None if module.bias is None else module.bias.to(x.dtype))
            return _capped(logits, module.soft_cap)
        if isinstance(module, CrossEntropy):
            return _capped(x, module.soft_cap)
        if isinstance(module, torch.nn.Dropout):
            return x
        if isinstance(module, (PositionEmbedding, Rotary)):
            positions = torch.arange(self.length, self.length + x.shape[1], device=x.device)
            return module.reference(x, positions, *[getattr(module, name) for name in module.signature.params])
        return module(x)

    def _attend(self, op: Attention, x: Tensor, path: str) -> Tensor:
        """Attention of new queries to all keys so far: [b, t, (h + 2g) e] -> [b, t, h e]."""
        b, t, width = x.shape
        h, g = op.heads, op.kv_heads
        heads = x.view(b, t, h + 2 * g, width // (h + 2 * g)).transpose(1, 2)
        q, k, v = heads.split((h, g, g), 1)
        if path in self.caches:
            before = self.caches[path]
            k, v = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
        self.caches[path] = k, v
        at = torch.arange(self.length, self.length + t, device=x.device)[:, None]
        keys = torch.arange(k.shape[2], device=x.device)
        seen = keys <= at
        if op.window is not None:
            seen &= keys > at - op.window
        if op.soft_cap is None:
            y = F.scaled_dot_product_attention(q, k, v, seen, scale=op.scale, enable_gqa=h != g)
        else:
            scale = q.shape[-1] ** -0.5 if op.scale is None else op.scale
            k, v = k.repeat_interleave(h // g, 1), v.repeat_interleave(h // g, 1)
            scores = _capped(q @ k.transpose(-1, -2) * scale, op.soft_cap)
            y = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        return y.transpose(1, 2).reshape(b, t, -1)


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def _check(container: torch.nn.Module, prefix: str) -> None:
    for name, module in container._modules.items():
        path = f"{prefix}{name}"
        what = f"{type(module).__name__} (op {path})"
        if isinstance(module, torch.nn.Sequential):
            _check(module, path + ".")
        elif isinstance(module, Attention):
            if not module.causal or module.mask or module.cu_seqlens:
                raise ValueError(
                    f"{what}: sampling needs causal attention without mask and borders; give it causal=True"
                )
        elif isinstance(module, (CrossEntropy, LinearCrossEntropy)) or not isinstance(module, Op):
            continue
        elif module.present_inputs() or module.num_extra_outputs:
            raise TypeError(f"{what}: sampling cannot serve extra inputs and outputs; use a chain without them")
