"""Small, randomly initialised models of the families that `fusible.fuse` knows, for benchmarks and tests.

Nothing is downloaded. `transformers` is imported when one of its models is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["FAMILIES", "GATED", "Family", "Size"]


class Size(NamedTuple):
    """How large a model is. `hidden` is the width of the MLP."""

    width: int = 64
    hidden: int = 176
    layers: int = 2
    heads: int = 4
    vocabulary: int = 100


class Family(NamedTuple):
    """`make(size)` gives a model, `loss(model, rows, length, seed)` its loss on random data."""

    make: Callable[[Size], torch.nn.Module]
    loss: Callable[..., Tensor]


def _transformers(name: str) -> Any:
    return getattr(importlib.import_module("transformers"), name)


def _common(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "intermediate_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "vocab_size": size.vocabulary,
    }


def _decoder(config: str, model: str, heads: bool = True, head_dim: bool = False, **options: Any) -> Family:
    def make(size: Size) -> torch.nn.Module:
        given = {**_common(size), **options}
        if heads:
            given["num_key_value_heads"] = size.heads // 2
        if head_dim:
            given["head_dim"] = size.width // size.heads
        return _transformers(model)(_transformers(config)(**given))

    return Family(make, language_loss)


def language_loss(model: torch.nn.Module, rows: int, length: int, seed: int = 0) -> Tensor:
    """The loss of a language model on random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.config.vocab_size, (rows, length), generator=generator)  # type: ignore[union-attr, arg-type]
    logits = model(input_ids=tokens).logits  # its own loss would be in float32, whatever the model is in
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _gpt2(size: Size) -> torch.nn.Module:
    config = _transformers("GPT2Config")(
        n_embd=size.width, n_inner=size.hidden, n_layer=size.layers, n_head=size.heads, vocab_size=size.vocabulary,
        n_positions=1024, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return _transformers("GPT2LMHeadModel")(config)


_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_PATCH = 4


def _vit(size: Size) -> torch.nn.Module:
    config = _transformers("ViTConfig")(
        hidden_size=size.width, intermediate_size=size.hidden, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, image_size=64, patch_size=_PATCH, num_labels=10, **_NO_DROPOUT,
    )  # fmt: skip
    return _transformers("ViTForImageClassification")(config)


def _image_loss(model: torch.nn.Module, rows: int, length: int, seed: int = 0) -> Tensor:
    """`length` is rounded to a square number of patches by interpolation of the positions."""
    side = _PATCH * max(1, round(length**0.5))
    dtype = next(model.parameters()).dtype
    images = torch.randn(rows, 3, side, side, generator=torch.Generator().manual_seed(seed)).to(dtype)
    labels = torch.arange(rows) % 10
    return model(images, labels=labels, interpolate_pos_encoding=True).loss


class _Encoder(torch.nn.Module):
    """Layers of `torch.nn` between an embedding and a head."""

    def __init__(self, size: Size, norm_first: bool, activation: str) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(size.vocabulary, size.width)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                size.width, size.heads, size.hidden, 0.0, activation, batch_first=True, norm_first=norm_first
            )
            for _ in range(size.layers)
        )
        self.head = torch.nn.Sequential(
            torch.nn.Linear(size.width, size.width),
            torch.nn.GELU(),
            torch.nn.LayerNorm(size.width),
            torch.nn.Linear(size.width, size.vocabulary),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _token_loss(model: torch.nn.Module, rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.embed.num_embeddings  # type: ignore[union-attr]
    tokens = torch.randint(0, vocabulary, (rows, length), generator=generator)  # type: ignore[arg-type]
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


FAMILIES: dict[str, Family] = {
    "llama": _decoder("LlamaConfig", "LlamaForCausalLM"),
    "mistral": _decoder("MistralConfig", "MistralForCausalLM"),
    "qwen2": _decoder("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": _decoder("Qwen3Config", "Qwen3ForCausalLM", head_dim=True),
    "gemma": _decoder("GemmaConfig", "GemmaForCausalLM", head_dim=True),
    "gemma2": _decoder("Gemma2Config", "Gemma2ForCausalLM", head_dim=True),
    "gemma3": _decoder("Gemma3TextConfig", "Gemma3ForCausalLM", head_dim=True),
    "phi3": _decoder("Phi3Config", "Phi3ForCausalLM", pad_token_id=0),
    "gpt2": Family(_gpt2, language_loss),
    "gpt_neox": _decoder("GPTNeoXConfig", "GPTNeoXForCausalLM", heads=False),
    "gpt_neox, one by one": _decoder("GPTNeoXConfig", "GPTNeoXForCausalLM", heads=False, use_parallel_residual=False),
    "bert": _decoder("BertConfig", "BertForMaskedLM", heads=False, **_NO_DROPOUT),
    "vit": Family(_vit, _image_loss),
    "torch.nn, norm first": Family(lambda size: _Encoder(size, True, "gelu"), _token_loss),
    "torch.nn, norm last": Family(lambda size: _Encoder(size, False, "relu"), _token_loss),
}

#: Those with a gated MLP.
GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")
