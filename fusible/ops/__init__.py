"""The ops, by family, and which of them stand for which `torch.nn` modules."""

from __future__ import annotations

import torch

from fusible.op import Op
from fusible.ops.activation import GELU, QGELU, ReLU, Sigmoid, SiLU, SReLU, Tanh
from fusible.ops.attention import Attention
from fusible.ops.dropout import Dropout
from fusible.ops.embedding import Embedding, PositionEmbedding
from fusible.ops.extra import AddExtraInput, MakeExtraOutput
from fusible.ops.gated import GEGLU, GLU, QGEGLU, ClampedSwiGLU, ReGLU, SiTUGLU, SReGLU, SwiGLU
from fusible.ops.linear import BasicLinear, Bias, Linear
from fusible.ops.loss import CrossEntropy, LinearCrossEntropy
from fusible.ops.norm import L2Normalization, LayerNorm, QKNorm, RMSNorm
from fusible.ops.pair import PairLinear
from fusible.ops.residual import Residual
from fusible.ops.rotary import Rotary
from fusible.ops.scale import ConstantScale
from fusible.ops.shape import Identity, Reshape

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "Attention",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "CrossEntropy",
    "Dropout",
    "Embedding",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "MakeExtraOutput",
    "PairLinear",
    "PositionEmbedding",
    "QKNorm",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Reshape",
    "Residual",
    "Rotary",
    "SReGLU",
    "SReLU",
    "SiLU",
    "SiTUGLU",
    "Sigmoid",
    "SwiGLU",
    "Tanh",
]

#: The op that a `torch.nn` module of exactly this type is viewed as in a chain.
TWINS: dict[type[torch.nn.Module], type[Op]] = {
    torch.nn.Linear: Linear,
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.RMSNorm: RMSNorm,
    torch.nn.GELU: GELU,
    torch.nn.ReLU: ReLU,
    torch.nn.SiLU: SiLU,
    torch.nn.Sigmoid: Sigmoid,
    torch.nn.Tanh: Tanh,
    torch.nn.GLU: GLU,
    torch.nn.Dropout: Dropout,
    torch.nn.Embedding: Embedding,
    torch.nn.Identity: Identity,
}
