"""Adapters for norms, activations and linear layers of `transformers`, which chains take in.

Each norm keeps its rounding: in float32 they all are `ops.RMSNorm`; in any other dtype an op here does step by step
what the model's code does, statistics in float32 and each conversion where it is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible.adapting import adapter
from fusible.borrowing import borrow
from fusible.fusing import Choice
from fusible.op import Op
from fusible.ops import GELU, QGELU, RMSNorm, SiLU, SReLU

_FIVE = ("transformers", 5)


class _Rounding(Op):
    """An RMSNorm whose statistics are in float32 whatever x's dtype is, also for float64."""

    aliases = False
    grad_aliases = False
    eps: float

    def statistics(self, x: Tensor) -> Tensor:
        """x, normalised, in float32."""
        wide = x.to(torch.float32)
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)


class RoundsBeforeGain(_Rounding):
    """`y = g round(x̂)`, with x̂ rounded to x's dtype: Llama's, and the like."""

    def reference(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * self.statistics(x).to(x.dtype)


class RoundsOnce(_Rounding):
    """`y = round(x̂ (1 + w))`, all of it in float32: Gemma's."""

    def reference(self, x: Tensor, weight: Tensor) -> Tensor:
        return (self.statistics(x) * (1.0 + weight.float())).type_as(x)


def _norm(norm: torch.nn.Module, chain: Any, eps: str, other: type[Op], zero_centered: bool) -> Any:
    chain.fixed(norm, eps)
    options = {"eps": norm.__dict__[eps]}
    affine = {"elementwise_affine": True, "zero_centered_gamma": zero_centered}
    shape = tuple(norm.weight.shape)  # type: ignore[arg-type]
    fast = borrow(RMSNorm, norm, normalized_shape=shape, **options, **affine)
    return chain(Choice(fast, borrow(other, norm, **options)))


_LLAMA_NORMS = [
    f"transformers.models.{file}.modeling_{file}.{name}RMSNorm"
    for file, name in (
        ("llama", "Llama"),
        ("mistral", "Mistral"),
        ("phi3", "Phi3"),
        ("qwen2", "Qwen2"),
        ("qwen3", "Qwen3"),
    )
]
_GEMMA_NORMS = [
    f"transformers.models.{file}.modeling_{file}.{name}RMSNorm"
    for file, name in (("gemma", "Gemma"), ("gemma2", "Gemma2"), ("gemma3", "Gemma3"))
]


@adapter(
    *_LLAMA_NORMS, needs=_FIVE,
    reads=("dtype", "to", "torch", "float32", "pow", "mean", "rsqrt", "variance_epsilon", "weight"),
)  # fmt: skip
def llama_norm(norm, chain):
    """Gain times what was rounded."""
    return _norm(norm, chain, "variance_epsilon", RoundsBeforeGain, False)


@adapter(*_GEMMA_NORMS, needs=_FIVE, reads=("_norm", "float", "weight", "type_as"))
def gemma_norm(norm, chain):
    """One rounding; the weight is stored as gain - 1."""
    return _norm(norm, chain, "eps", RoundsOnce, True)


_ACTIVATIONS = "transformers.activations."


@adapter(_ACTIVATIONS + "SiLUActivation", alone=False, reads=("nn", "functional", "silu"))
def silu(act, chain):
    """`torch.nn.functional.silu`."""
    return chain(SiLU())


@adapter(_ACTIVATIONS + "GELUActivation", alone=False, reads=("act",))
def gelu(act, chain):
    """GELU, unless written out in Python, which is for old checkpoints' sake."""
    chain.fixed(act, "act")
    if act.act is not F.gelu:
        chain.decline("this GELU is written out in Python, step by step")
    return chain(GELU())


@adapter(_ACTIVATIONS + "GELUTanh", alone=False, reads=("act",))
def gelu_tanh(act, chain):
    """GELU's approximation by torch."""
    chain.fixed(act, "act")
    if not isinstance(act.act, functools.partial):
        chain.decline("this GELU is written out in Python, step by step")
    return chain(GELU("tanh"))


@adapter(_ACTIVATIONS + "NewGELUActivation", alone=False, reads=("torch", "tanh", "math", "sqrt", "pi", "pow"))
def new_gelu(act, chain):
    """The same approximation, in seven passes of its own."""
    return chain(GELU("tanh"))


@adapter(_ACTIVATIONS + "QuickGELUActivation", alone=False, reads=("torch", "sigmoid"))
def quick_gelu(act, chain):
    """`x sigmoid(1.702 x)`."""
    return chain(QGELU())


@adapter(_ACTIVATIONS + "ReLUSquaredActivation", alone=False, reads=("nn", "functional", "relu", "torch", "square"))
def squared_relu(act, chain):
    """`max(x, 0)²`."""
    return chain(SReLU())


@adapter(
    "transformers.pytorch_utils.Conv1D", alone=False,
    reads=("size", "nf", "torch", "addmm", "bias", "view", "weight"),
)  # fmt: skip
def conv1d(linear, chain):
    """A linear layer with a transposed weight."""
    return chain(chain.transposed(linear))
