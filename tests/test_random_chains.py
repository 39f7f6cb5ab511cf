"""Random chains against their plain formulas, in float64: fused, frozen and used in part, nested, split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import SETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fusible import Op, Sequential, ops, use_rules
from fusible.testing import check

#: Cheap enough to run two hundred of them in a minute; the same ones in every run.
SETTINGS = settings(
    max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

ACTIVATIONS = [ops.GELU, ops.QGELU, ops.ReLU, ops.SReLU, ops.SiLU, ops.Sigmoid, ops.Tanh]
GATED = [ops.SwiGLU, ops.GEGLU, ops.QGEGLU, ops.ReGLU, ops.SReGLU, ops.GLU, ops.ClampedSwiGLU, ops.SiTUGLU]
WIDTHS = [2, 4, 8]


class Softmax(Op):
    """An op of a user's, without kernels."""

    def reference(self, x):
        return x.softmax(-1)


class Opaque(Op):
    """An op whose shapes are unknown without data."""

    def reference(self, x):
        return x * (1.0 if float(x.detach().sum()) < 1e9 else 2.0)


class Chain:
    """Draws a chain op by op, with the width of the stream and the channels made so far in hand."""

    def __init__(self, data: Any, splits: bool) -> None:
        self.data = data
        self.splits = splits
        self.width = data.draw(st.sampled_from(WIDTHS), label="width")
        self.start = self.width
        self.extras: list[int] = []
        self.channels: dict[str, int] = {}
        self.shared: dict[str, int] = {}

    def draw(self, strategy: Any, label: str = "") -> Any:
        return self.data.draw(strategy, label=label)

    def pick(self, options: list[Callable[..., Any]]) -> Any:
        return self.draw(st.sampled_from(options))

    def run(self, depth: int) -> list[nn.Module]:
        kinds = [self.linear, self.bias, self.norm, self.pointwise, self.scale, self.extra_input, self.extra_output]
        kinds += [self.linear, self.pointwise, self.gated, self.named_input, self.named_output, self.user_op]
        kinds += [self.residual, self.residual] if depth < 2 else []
        kinds += [self.nested] if depth < 2 else []
        kinds += [self.split] if self.splits else []
        modules: list[nn.Module] = []
        for _ in range(self.draw(st.integers(0, 4 if depth else 7))):
            module = self.pick(kinds)(depth)
            modules += module if isinstance(module, list) else [module]
        return modules

    def linear(self, depth: int) -> nn.Module:
        before, self.width = self.width, self.draw(st.sampled_from(WIDTHS))
        bias = self.draw(st.booleans())
        kind = self.pick([ops.Linear, nn.Linear, ops.BasicLinear])
        return kind(before, self.width) if kind is ops.BasicLinear else kind(before, self.width, bias=bias)

    def bias(self, depth: int) -> nn.Module:
        return ops.Bias(self.width)

    def norm(self, depth: int) -> nn.Module:
        kind = self.pick([ops.LayerNorm, ops.RMSNorm, nn.LayerNorm, nn.RMSNorm, ops.L2Normalization])
        if kind is ops.L2Normalization:
            return kind(0.1)
        options = {"elementwise_affine": self.draw(st.booleans())}
        if kind in (ops.LayerNorm, ops.RMSNorm):
            options["zero_centered_gamma"] = self.draw(st.booleans())
        return kind(self.width, eps=0.1, **options)

    def pointwise(self, depth: int) -> nn.Module:
        return self.pick([*ACTIVATIONS, nn.ReLU, nn.Identity])()

    def gated(self, depth: int) -> nn.Module:
        kind = self.pick(GATED)
        before, self.width = self.width, self.width // 2 if self.width > 2 else self.width
        return kind() if before > 2 else ops.Tanh()

    def scale(self, depth: int) -> nn.Module:
        return ops.ConstantScale(self.draw(st.sampled_from([0.5, -1.0, 2.0])))

    def user_op(self, depth: int) -> nn.Module:
        return self.pick([Softmax, Opaque])()

    def extra_input(self, depth: int) -> nn.Module:
        self.extras.append(self.width)
        return ops.AddExtraInput()

    def extra_output(self, depth: int) -> nn.Module:
        return ops.MakeExtraOutput()

    def named_output(self, depth: int) -> nn.Module:
        name = f"channel {len(self.channels)}"
        self.channels[name] = self.width
        return ops.MakeExtraOutput(name, keep=self.draw(st.booleans()))

    def named_input(self, depth: int) -> nn.Module:
        fits = [name for name, width in self.channels.items() if width == self.width]
        if fits and self.draw(st.booleans()):
            return ops.AddExtraInput(self.draw(st.sampled_from(fits)))
        if not self.draw(st.booleans()):
            return ops.Tanh()
        name = f"shared_{self.width}"
        self.shared[name] = self.width
        return ops.AddExtraInput(name)

    def residual(self, depth: int) -> nn.Module:
        before = self.width
        modules = self.run(depth + 1)
        if self.width != before:
            modules.append(ops.Linear(self.width, before))
            self.width = before
        return ops.Residual(*modules)

    def nested(self, depth: int) -> nn.Module:
        return nn.Sequential(*[self.pointwise(depth), self.linear(depth)])

    def split(self, depth: int) -> nn.Module:
        return self.pick([nn.Softplus, lambda: nn.ELU(0.5), lambda: nn.Sequential(nn.Softsign(), nn.LogSigmoid())])()

    def block(self) -> Sequential:
        modules = self.run(0)
        rules = SETS[self.draw(st.sampled_from(list(SETS)), "rules")]
        block = Sequential(*modules, inputs=tuple(self.shared), rules=rules)
        for parameter in block.double().parameters():
            nn.init.normal_(parameter, 0.2, 0.6)
        return block


@pytest.mark.parametrize("splits", [False, True], ids=["one chain", "splits"])
@SETTINGS
@given(data=st.data())
def test_random_chains(splits, data):
    torch.manual_seed(13)
    chain = Chain(data, splits)
    block = chain.block()
    leading = data.draw(st.sampled_from([(3,), (), (2, 2), (1,)]), label="leading dimensions")
    x, *extras = [torch.randn(*leading, width, dtype=torch.float64) for width in (chain.start, *chain.extras)]
    named = {name: torch.randn(*leading, width, dtype=torch.float64) for name, width in chain.shared.items()}
    for parameter in block.parameters():
        parameter.requires_grad_(data.draw(st.booleans(), label="wants a gradient"))
    wants = [data.draw(st.booleans(), label="wants a gradient") for _ in (x, *extras, *named)]
    values = [t.requires_grad_(want) for t, want in zip((x, *extras, *named.values()), wants, strict=True)]
    compare_backward(data, block, values, list(named))
    check(block, x.detach(), *extras, layouts=False, frozen=False, **named)


def compare_backward(data: Any, block: Sequential, values: list[torch.Tensor], names: list[str]) -> None:
    """Some outputs used, some tensors frozen: every gradient as in the plain formulas, `None` where theirs is."""
    first = len(values) - len(names)
    named = dict(zip(names, values[first:], strict=True))
    results = []
    used = None
    for function in (block, block.reference):
        outs = function(*values[:first], **named)
        outs = outs if isinstance(outs, tuple) else (outs,)
        if used is None:
            used = [data.draw(st.booleans(), label="output is used") for _ in outs]
        kept = [out for out, use in zip(outs, used, strict=True) if use and out.requires_grad]
        leaves = [t for t in (*values, *block.parameters()) if t.requires_grad]
        sums = [out.sin().sum() for out in kept]
        grads = torch.autograd.grad(sums, leaves, allow_unused=True) if kept and leaves else ()
        results.append((outs, grads, [out.requires_grad for out in outs]))
    (outs, grads, require), (plain, right, wanted) = results
    assert require == wanted
    for a, b in zip((*outs, *grads), (*plain, *right), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@settings(SETTINGS, max_examples=60)
@given(data=st.data())
def test_rules_change_nothing(data):
    """The same chain under every set of rules gives the same values and gradients, bit for bit or nearly."""
    torch.manual_seed(14)
    chain = Chain(data, splits=False)
    block = chain.block()
    tensors = [torch.randn(3, width, dtype=torch.float64) for width in (chain.start, *chain.extras)]
    named = {name: torch.randn(3, width, dtype=torch.float64) for name, width in chain.shared.items()}
    results = []
    for rules in SETS.values():
        leaves = [t.clone().requires_grad_() for t in tensors]
        with use_rules(rules):
            outs = block(*leaves, **named)
        outs = outs if isinstance(outs, tuple) else (outs,)
        wanted = [*leaves, *block.parameters()]
        grads = torch.autograd.grad([out.sin().sum() for out in outs], wanted, allow_unused=True)
        results.append([*outs, *[g for g in grads if g is not None]])
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
