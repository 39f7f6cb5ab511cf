"""Adapters for decoders of `transformers`: Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, Phi-3, GPT-2, GPT-NeoX.

The attention module of a layer is called as it is, with whatever the layer was called with. What is around it becomes
two chains: the norm before it; the residual addition, the norm and the MLP behind it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from fusible.fusing import adapter
from fusible.ops import AddExtraInput, MakeExtraOutput

_FIVE = ("transformers", 5)
_GATED = (("gemma", "Gemma"), ("gemma2", "Gemma2"), ("gemma3", "Gemma3"), ("llama", "Llama"), ("mistral", "Mistral"),
          ("qwen2", "Qwen2"), ("qwen3", "Qwen3"))  # fmt: skip


def _names(kind: str, models: Any) -> list[str]:
    return [f"transformers.models.{file}.modeling_{file}.{name}{kind}" for file, name in models]


def _behind(layer: torch.nn.Module, first: str) -> Callable[[tuple, dict], dict]:
    """Turns the arguments that follow the first one into keywords, as the layer names them."""
    names = list(inspect.signature(type(layer).forward).parameters)[2:]  # type: ignore[arg-type]

    def named(args: tuple, kwargs: dict) -> dict:
        return {**dict(zip(names, args, strict=False)), **kwargs} if args else kwargs

    return named


@adapter(*_names("MLP", _GATED), needs=_FIVE, reads=("down_proj", "act_fn", "gate_proj", "up_proj"))
def gated_mlp(mlp, chain):
    """`down(act(gate(x)) * up(x))`."""
    return chain(chain.gated(mlp.gate_proj, mlp.act_fn, mlp.up_proj), mlp.down_proj)


def _tail(chain: Any, before: tuple, norm: Any, mlp: torch.nn.Module, after: tuple) -> Callable[[Any, Any], Any]:
    """`h = x + before(attended)`, `h + after(mlp(norm(h)))`: one chain, or around an MLP that is none, two."""
    whole = chain.attempt(*before, AddExtraInput(), chain.residual(norm, mlp, *after))
    if whole is not None:
        return whole
    head = chain(*before, AddExtraInput(), MakeExtraOutput(), norm)
    foot = chain(*after, AddExtraInput())

    def run(attended: Any, x: Any) -> Any:
        normal, residual = head(attended, x)
        return foot(mlp(normal), residual)

    return run


def _layer(layer: torch.nn.Module, attend: Any, start: Any, tail: Any) -> Callable[..., Any]:
    """The forward of a layer whose attention takes and returns what that of Llama does."""
    named = _behind(layer, "hidden_states")

    def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        attended = attend(hidden_states=start(hidden_states), **named(args, kwargs))[0]
        return tail(attended, hidden_states)

    return forward


@adapter(
    *_names("DecoderLayer", (("gemma", "Gemma"), ("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"),
                             ("qwen3", "Qwen3"))),
    needs=_FIVE,
    reads=("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
)  # fmt: skip
def llama_layer(layer, chain):
    """Norms before attention and before the MLP."""
    start = chain(layer.input_layernorm)
    tail = _tail(chain, (), layer.post_attention_layernorm, layer.mlp, ())
    return _layer(layer, layer.self_attn, start, tail)


@adapter(
    *_names("DecoderLayer", (("gemma2", "Gemma2"), ("gemma3", "Gemma3"))), needs=_FIVE,
    reads=("input_layernorm", "self_attn", "post_attention_layernorm", "pre_feedforward_layernorm", "mlp",
           "post_feedforward_layernorm"),
)  # fmt: skip
def gemma2_layer(layer, chain):
    """Norms before and behind each of the two."""
    start = chain(layer.input_layernorm)
    before, after = (layer.post_attention_layernorm,), (layer.post_feedforward_layernorm,)
    return _layer(layer, layer.self_attn, start, _tail(chain, before, layer.pre_feedforward_layernorm, layer.mlp, after))
