"""Pointwise activations. y has x's shape and dtype; integer or complex x raises `ValueError`."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible import kernels
from fusible.op import Grads, Op, Out, Saved, Spec, reads_for
from fusible.ops._checks import arithmetic

__all__ = ["GELU", "QGELU", "ReLU", "SReLU", "SiLU", "Sigmoid", "Tanh"]


class _Activation(Op):
    """What all of them share: always fresh results, x's shape and dtype."""

    aliases = False
    grad_aliases = False

    def apply_(self, x: Tensor) -> Tensor:
        """Writes y over x, an intermediate of our own, and returns it."""
        raise NotImplementedError

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        return arithmetic(x)


class GELU(_Activation, torch.nn.GELU):
    """`y = x Φ(x)`, or with `approximate="tanh"` its approximation. `torch.nn.GELU`, as an op.

    Source: Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016.
    """

    fixed = ("approximate",)

    class Saved(Saved):
        x: Tensor = reads_for("x")

    def reference(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate=self.approximate)

    def fwd(self, x: Tensor) -> Out:
        return Out(kernels.gelu(x, self.approximate), saved=GELU.Saved(x))

    def apply_(self, x: Tensor) -> Tensor:
        return kernels.gelu_(x, self.approximate)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return Grads(kernels.dgelu(dy, saved.x, self.approximate))


class QGELU(_Activation):
    """`y = x sigmoid(1.702 x)`, the quick approximation of GELU.

    Source: Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016.
    """

    class Saved(Saved):
        x: Tensor = reads_for("x")

    def reference(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)

    def fwd(self, x: Tensor) -> Out:
        return Out(kernels.qgelu(x), saved=QGELU.Saved(x))

    def apply_(self, x: Tensor) -> Tensor:
        return kernels.qgelu_(x)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return Grads(kernels.dqgelu(dy, saved.x))


class ReLU(_Activation, torch.nn.ReLU):
    """`y = max(x, 0)`. `torch.nn.ReLU`, as an op; `inplace` has no effect. The record is y."""

    class Saved(Saved):
        y: Tensor = reads_for("x")

    def reference(self, x: Tensor) -> Tensor:
        return torch.relu(x)

    def fwd(self, x: Tensor) -> Out:
        y = kernels.relu(x)
        return Out(y, saved=ReLU.Saved(y))

    def apply_(self, x: Tensor) -> Tensor:
        return kernels.relu_(x)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return Grads(kernels.drelu(dy, saved.y))


class SReLU(_Activation):
    """`y = max(x, 0)²`, the squared ReLU.

    Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021.
    """

    class Saved(Saved):
        x: Tensor = reads_for("x")

    def reference(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        return y * y

    def fwd(self, x: Tensor) -> Out:
        return Out(kernels.srelu(x), saved=SReLU.Saved(x))

    def apply_(self, x: Tensor) -> Tensor:
        return kernels.srelu_(x)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return Grads(kernels.dsrelu(dy, saved.x))


class SiLU(_Activation, torch.nn.SiLU):
    """`y = x sigmoid(x)`. `torch.nn.SiLU`, as an op; `inplace` has no effect.

    Source: Elfwing, Uchibe, Doya, "Sigmoid-Weighted Linear Units for Neural Network Function Approximation", 2017.
    """

    class Saved(Saved):
        x: Tensor = reads_for("x")

    def reference(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def fwd(self, x: Tensor) -> Out:
        return Out(kernels.silu(x), saved=SiLU.Saved(x))

    def apply_(self, x: Tensor) -> Tensor:
        return kernels.silu_(x)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return Grads(kernels.dsilu(dy, saved.x))


class Sigmoid(_Activation, torch.nn.Sigmoid):
    """`y = 1 / (1 + exp(-x))`. `torch.nn.Sigmoid`, as an op. The record is y."""

    class Saved(Saved):
        y: Tensor = reads_for("x")

    def reference(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def fwd(self, x: Tensor) -> Out:
        y = kernels.sigmoid(x)
        return Out(y, saved=Sigmoid.Saved(y))

    def apply_(self, x: Tensor) -> Tensor:
        return kernels.sigmoid_(x)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return Grads(kernels.dsigmoid(dy, saved.y))


class Tanh(_Activation, torch.nn.Tanh):
    """`y = tanh(x)`. `torch.nn.Tanh`, as an op. The record is y."""

    class Saved(Saved):
        y: Tensor = reads_for("x")

    def reference(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def fwd(self, x: Tensor) -> Out:
        y = kernels.tanh(x)
        return Out(y, saved=Tanh.Saved(y))

    def apply_(self, x: Tensor) -> Tensor:
        return kernels.tanh_(x)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return Grads(kernels.dtanh(dy, saved.y))


#: The activations that keep their input for backward, and all of them: for the slots of rules.
KeepsInput: TypeAlias = GELU | QGELU | SReLU | SiLU
Activation: TypeAlias = KeepsInput | ReLU | Sigmoid | Tanh
