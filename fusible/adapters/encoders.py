"""Adapters for encoders of `transformers`: BERT and ViT."""

from __future__ import annotations

from typing import Any

from fusible.adapting import adapter
from fusible.ops import AddExtraInput

_FIVE = ("transformers", 5)
_BERT = "transformers.models.bert.modeling_bert."
_VIT = "transformers.models.vit.modeling_vit."


@adapter(_BERT + "BertIntermediate", needs=_FIVE, reads=("dense", "intermediate_act_fn"))
def bert_intermediate(module, chain):
    """`act(dense(x))`."""
    chain.fixed(module, "intermediate_act_fn")
    return chain(module.dense, module.intermediate_act_fn)


@adapter(_BERT + "BertSelfOutput", _BERT + "BertOutput", needs=_FIVE, reads=("dense", "dropout", "LayerNorm"))
def bert_output(module, chain):
    """`norm(dropout(dense(x)) + residual)`."""
    run = chain(module.dense, module.dropout, AddExtraInput(), module.LayerNorm)

    def forward(hidden_states: Any, input_tensor: Any) -> Any:
        return run(hidden_states, input_tensor)

    return forward


@adapter(
    _BERT + "BertLayer", needs=_FIVE,
    reads=("attention", "is_decoder", "hasattr", "ValueError", "crossattention", "apply_chunking_to_forward",
           "feed_forward_chunk", "chunk_size_feed_forward", "seq_len_dim"),
)  # fmt: skip
def bert_layer(layer, chain):
    """`norm(h + dropout(dense(act(dense(h)))))` behind attention, with what attention ends in fused by itself."""
    chain.fixed(layer, "chunk_size_feed_forward", "is_decoder")
    if layer.is_decoder or layer.chunk_size_feed_forward:
        chain.decline("it is a decoder's" if layer.is_decoder else "it runs its MLP in chunks")
    out, attend = layer.output, layer.attention
    run = chain(chain.residual(layer.intermediate, out.dense, out.dropout), out.LayerNorm)

    def forward(
        hidden_states: Any, attention_mask: Any = None, encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None, cache: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        return run(attend(hidden_states, attention_mask, cache=cache, **kwargs)[0])

    return forward


@adapter(_BERT + "BertPredictionHeadTransform", needs=_FIVE, reads=("dense", "transform_act_fn", "LayerNorm"))
def bert_head(module, chain):
    """`norm(act(dense(x)))`."""
    chain.fixed(module, "transform_act_fn")
    return chain(module.dense, module.transform_act_fn, module.LayerNorm)


@adapter(_VIT + "ViTMLP", needs=_FIVE, reads=("fc1", "activation_fn", "fc2"))
def vit_mlp(mlp, chain):
    """`fc2(act(fc1(x)))`."""
    return chain(mlp.fc1, mlp.activation_fn, mlp.fc2)


@adapter(_VIT + "ViTLayer", needs=_FIVE, reads=("layernorm_before", "attention", "dropout", "layernorm_after", "mlp"))
def vit_layer(layer, chain):
    """Norms before attention and before the MLP, one dropout module behind both."""
    start, attend = chain(layer.layernorm_before), layer.attention
    tail = chain(layer.dropout, AddExtraInput(), chain.residual(layer.layernorm_after, layer.mlp, layer.dropout))

    def forward(hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        attended = start.then(hidden_states, lambda normal: attend(normal, attention_mask, **kwargs)[0])
        return tail(attended, hidden_states)

    return forward
