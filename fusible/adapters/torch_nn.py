"""Adapters for modules of `torch.nn`: `Sequential` and the layers of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.adapting import adapter
from fusible.chain import Chain as Run
from fusible.fuser import PLAIN_TENSORS
from fusible.ops import AddExtraInput, MakeExtraOutput


@adapter(torch.nn.Sequential)
def sequential(module, chain):
    """The runs of ops in it; modules between them run as they are."""
    run = chain.runs()
    parts = [part for part in run.layout.parts if isinstance(part, Run)]
    if not any(len({node.path for node in part.nodes}) > 1 for part in parts):
        chain.decline("no two neighbours in it are ops of fusible")

    def forward(input: Any) -> Any:
        y = run(input) if type(input) in PLAIN_TENSORS and input.dim() else None
        return chain.stock(input) if y is None else y

    return forward


def _trains(layer: torch.nn.Module, x: Tensor) -> bool:
    """Whether the stock layer would not take its fast path of inference, which stays what it is."""
    if type(x) not in PLAIN_TENSORS or x.is_nested or not torch.is_grad_enabled():
        return False
    return layer.training or any(parameter.requires_grad for parameter in layer.parameters())


def _attended(attend: Any, start: Any, x: Tensor, masks: dict[str, Any]) -> Tensor:
    """Self-attention, behind the norm `start` or, if that is `None`, on x itself."""

    def call(x: Tensor) -> Tensor:
        return attend(x, x, x, need_weights=False, **masks)[0]

    return call(x) if start is None else start.then(x, call)


@adapter(torch.nn.TransformerEncoderLayer)
def encoder_layer(layer, chain):
    """`h = x + attention`, `y = h + feed_forward`, each with its norm before it or behind it."""
    chain.fixed(layer, "norm_first", "activation")
    feed = layer.linear1, layer.activation, layer.dropout, layer.linear2, layer.dropout2
    start = chain(layer.norm1) if layer.norm_first else None
    if layer.norm_first:
        rest = chain(layer.dropout1, AddExtraInput(), chain.residual(layer.norm2, *feed))
    else:
        rest = chain(layer.dropout1, AddExtraInput(), layer.norm1, chain.residual(*feed), layer.norm2)
    attend = layer.self_attn

    def forward(src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        if not _trains(layer, src):
            return chain.stock(src, src_mask, src_key_padding_mask, is_causal)
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
        return rest(_attended(attend, start, src, masks), src)

    return forward


@adapter(torch.nn.TransformerDecoderLayer)
def decoder_layer(layer, chain):
    """As an encoder's layer, with attention to the memory between the two."""
    chain.fixed(layer, "norm_first", "activation")
    feed = layer.linear1, layer.activation, layer.dropout, layer.linear2, layer.dropout3
    if layer.norm_first:
        start = chain(layer.norm1)
        middle = chain(layer.dropout1, AddExtraInput(), MakeExtraOutput(), layer.norm2)
        rest = chain(layer.dropout2, AddExtraInput(), chain.residual(layer.norm3, *feed))
    else:
        start = None
        middle = chain(layer.dropout1, AddExtraInput(), layer.norm1)
        rest = chain(layer.dropout2, AddExtraInput(), layer.norm2, chain.residual(*feed), layer.norm3)
    attend, attend_memory = layer.self_attn, layer.multihead_attn

    def forward(
        tgt, memory, tgt_mask=None, memory_mask=None, tgt_key_padding_mask=None, memory_key_padding_mask=None,
        tgt_is_causal=False, memory_is_causal=False,
    ):  # fmt: skip
        if not _trains(layer, tgt) or type(memory) not in PLAIN_TENSORS or memory.is_nested:
            return chain.stock(
                tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal,
                memory_is_causal,
            )  # fmt: skip
        masks = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask, "is_causal": tgt_is_causal}
        attended = _attended(attend, start, tgt, masks)
        if start is None:
            x = residual = middle(attended, tgt)
        else:
            x, residual = middle(attended, tgt)
        masks = {"attn_mask": memory_mask, "key_padding_mask": memory_key_padding_mask, "is_causal": memory_is_causal}
        return rest(attend_memory(x, memory, memory, need_weights=False, **masks)[0], residual)

    return forward
