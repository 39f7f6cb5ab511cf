"""Adapters for decoders of `transformers`: Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, Phi-3, GPT-2, GPT-NeoX.

The attention module of a layer is called as it is, with whatever the layer was called with. What is around it becomes
two chains: the norm before it; the residual addition, the norm and the MLP behind it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from fusible.adapting import adapter, plain_class
from fusible.ops import AddExtraInput, MakeExtraOutput

_FIVE = ("transformers", 5)
_GATED = (("gemma", "Gemma"), ("gemma2", "Gemma2"), ("gemma3", "Gemma3"), ("llama", "Llama"), ("mistral", "Mistral"),
          ("qwen2", "Qwen2"), ("qwen3", "Qwen3"))  # fmt: skip


def _names(kind: str, models: Any) -> list[str]:
    return [f"transformers.models.{file}.modeling_{file}.{name}{kind}" for file, name in models]


def _behind(layer: torch.nn.Module) -> Callable[[tuple, dict], dict]:
    """Turns the arguments that follow the first one into keywords, as the layer names them, its defaults included."""
    parameters = list(inspect.signature(plain_class(layer).forward).parameters.values())[2:]
    named = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    names = [parameter.name for parameter in named]
    defaults = {parameter.name: parameter.default for parameter in named if parameter.default is not parameter.empty}

    def keywords(args: tuple, kwargs: dict) -> dict:
        return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}

    return keywords


#: An argument's old name, which the stock forward still translates.
_OLD = "past_key_values"


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


def _layer(layer: torch.nn.Module, chain: Any, attend: Any, start: Any, tail: Any) -> Callable[..., Any]:
    """The forward of a layer whose attention takes and returns what that of Llama does."""
    named = _behind(layer)

    def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if _OLD in kwargs:
            return chain.stock(hidden_states, *args, **kwargs)
        given = named(args, kwargs)
        attended = start.then(hidden_states, lambda normal: attend(hidden_states=normal, **given)[0])
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
    return _layer(layer, chain, layer.self_attn, start, tail)


@adapter(
    *_names("DecoderLayer", (("gemma2", "Gemma2"), ("gemma3", "Gemma3"))), needs=_FIVE,
    reads=("input_layernorm", "self_attn", "post_attention_layernorm", "pre_feedforward_layernorm", "mlp",
           "post_feedforward_layernorm"),
)  # fmt: skip
def gemma2_layer(layer, chain):
    """Norms before and behind each of the two."""
    start = chain(layer.input_layernorm)
    before, after = (layer.post_attention_layernorm,), (layer.post_feedforward_layernorm,)
    return _layer(
        layer, chain, layer.self_attn, start, _tail(chain, before, layer.pre_feedforward_layernorm, layer.mlp, after)
    )


@adapter(
    *_names("MLP", (("phi3", "Phi3"),)), needs=_FIVE, reads=("gate_up_proj", "chunk", "activation_fn", "down_proj")
)
def phi3_mlp(mlp, chain):
    """`down(up * act(gate))`, gate and up being the halves of one projection."""
    return chain(mlp.gate_up_proj, chain.gate(mlp.activation_fn), mlp.down_proj)


@adapter(
    *_names("DecoderLayer", (("phi3", "Phi3"),)), needs=_FIVE,
    reads=("input_layernorm", "self_attn", "resid_attn_dropout", "post_attention_layernorm", "mlp",
           "resid_mlp_dropout"),
)  # fmt: skip
def phi3_layer(layer, chain):
    """As Llama's, with dropout before each addition."""
    start = chain(layer.input_layernorm)
    before, after = (layer.resid_attn_dropout,), (layer.resid_mlp_dropout,)
    return _layer(
        layer, chain, layer.self_attn, start, _tail(chain, before, layer.post_attention_layernorm, layer.mlp, after)
    )


@adapter(*_names("MLP", (("gpt2", "GPT2"),)), needs=_FIVE, reads=("c_fc", "act", "c_proj", "dropout"))
def gpt2_mlp(mlp, chain):
    """`dropout(proj(act(fc(x))))`, the weights stored as [in, out]."""
    return chain(mlp.c_fc, mlp.act, mlp.c_proj, mlp.dropout)


@adapter(
    *_names("Block", (("gpt2", "GPT2"),)), needs=_FIVE,
    reads=("ln_1", "attn", "hasattr", "ValueError", "ln_cross_attn", "crossattention", "ln_2", "mlp"),
)  # fmt: skip
def gpt2_block(block, chain):
    """Norms before attention and before the MLP; a block with cross-attention runs as it is."""
    if "crossattention" in block._modules:
        chain.decline("it has cross-attention")
    start, tail, attend = chain(block.ln_1), _tail(chain, (), block.ln_2, block.mlp, ()), block.attn
    named = _behind(block)

    def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        given = named(args, kwargs)
        if given.pop("encoder_hidden_states", None) is not None or _OLD in kwargs:
            return chain.stock(hidden_states, *args, **kwargs)
        given.pop("encoder_attention_mask", None)  # the stock forward gives it to cross-attention alone
        return tail(start.then(hidden_states, lambda normal: attend(normal, **given)[0]), hidden_states)

    return forward


@adapter(*_names("MLP", (("gpt_neox", "GPTNeoX"),)), needs=_FIVE, reads=("dense_h_to_4h", "act", "dense_4h_to_h"))
def neox_mlp(mlp, chain):
    """`down(act(up(x)))`."""
    return chain(mlp.dense_h_to_4h, mlp.act, mlp.dense_4h_to_h)


@adapter(
    *_names("Layer", (("gpt_neox", "GPTNeoX"),)), needs=_FIVE,
    reads=("attention", "input_layernorm", "post_attention_dropout", "use_parallel_residual", "mlp",
           "post_attention_layernorm", "post_mlp_dropout"),
)  # fmt: skip
def neox_layer(layer, chain):
    """MLP and attention side by side on one residual, or one behind the other."""
    chain.fixed(layer, "use_parallel_residual")
    start, attend, named = chain(layer.input_layernorm), layer.attention, _behind(layer)
    if layer.use_parallel_residual:
        beside = chain(chain.residual(layer.post_attention_layernorm, layer.mlp, layer.post_mlp_dropout))
        onto = chain(layer.post_attention_dropout, AddExtraInput())

        def both(attended: Any, x: Any) -> Any:
            return onto(attended, beside(x))

        tail: Callable[[Any, Any], Any] = both
    else:
        before, after = (layer.post_attention_dropout,), (layer.post_mlp_dropout,)
        tail = _tail(chain, before, layer.post_attention_layernorm, layer.mlp, after)

    def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        given = named(args, kwargs)
        return tail(start.then(hidden_states, lambda normal: attend(normal, **given)[0]), hidden_states)

    return forward
