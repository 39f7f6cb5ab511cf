"""Pointwise activations. y has x's shape and dtype; integer or complex x raises `ValueError`."""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

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
    repeats = True
    #: Its name in `kernels.bias_act` and its like.
    act: ClassVar[str]
    approximate = "none"

    def remember(self, x: Tensor, dtype: torch.dtype) -> Any:
        return self.Saved(x)

    def fwd_bias(self, x: Tensor, bias: Tensor, keeps: Any) -> tuple[Tensor, Saved]:
        """The output for `x + bias`, in one pass, and its record with the fields that it `keeps`."""
        keeps_input = "x" in self.Saved.fields
        y, pre = kernels.bias_act(x, bias, self.act, self.approximate, keeps_input and keeps.x)
        return y, self.Saved(pre if keeps_input else y)

    def bwd_bias(self, saved: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """(dx, its sum over the leading dimensions), in one pass."""
        return kernels.dact_dbias(dy, saved[0], self.act, self.approximate)

    def bwd_again(self, saved: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """(dx, the output computed again), in one pass; where the record holds the input."""
        return kernels.dact_recompute(dy, saved.x, self.act, self.approximate)

    def bwd_bias_again(self, saved: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(dx, its sum over the leading dimensions, the output computed again), in one pass."""
        return kernels.dact_dbias_recompute(dy, saved.x, self.act, self.approximate)

    def apply_(self, x: Tensor) -> Tensor:
        """Writes y over x, an intermediate of our own, and returns it."""
        raise NotImplementedError

    def infer(self, x: Spec, *, autocast: torch.dtype | None = None) -> Spec:
        return arithmetic(x)


class GELU(_Activation, torch.nn.GELU):
    """`y = x Φ(x)`, or with `approximate="tanh"` its approximation. `torch.nn.GELU`, as an op.

    Source: Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016.
    """

    act = "gelu"
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

    act = "qgelu"

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

    act = "relu"

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

    act = "srelu"

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

    act = "silu"

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

    act = "sigmoid"

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

    act = "tanh"

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
