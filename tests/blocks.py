"""The standard blocks: what people build of the ops, small. Each takes x of [..., 8]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fusible
from fusible import ops
from fusible.rule import Rule, RuleSet

#: Every rule that comes with fusible, by name.
SHIPPED: dict[str, Rule] = {
    name: getattr(fusible.rules, name)
    for name in fusible.rules.__all__
    if isinstance(getattr(fusible.rules, name), Rule)
}
ALL = RuleSet(SHIPPED.values())
SETS = {"default": fusible.rules.DEFAULT, "lean": fusible.rules.LEAN, "none": fusible.rules.NONE, "all": ALL}


def _mlp() -> list:
    return [ops.Residual(ops.LayerNorm(8), ops.Linear(8, 12), ops.GELU(), ops.Linear(12, 8))]


def _gated_mlp() -> list:
    return [
        ops.Residual(ops.RMSNorm(8), ops.Linear(8, 12, bias=False), ops.SwiGLU(), ops.Linear(6, 8, bias=False)),
    ]


def _pair_mlp() -> list:
    return [ops.Residual(ops.RMSNorm(8), ops.PairLinear(8, 6), ops.SwiGLU(), ops.Linear(6, 8, bias=False))]


def _twins() -> list:
    return [torch.nn.LayerNorm(8), torch.nn.Linear(8, 12), torch.nn.GELU("tanh"), torch.nn.Linear(12, 8)]


def _two_layers() -> list:
    return [*_mlp(), *_gated_mlp()]


def _relu_mlp() -> list:
    return [ops.Linear(8, 12), ops.ReLU(), ops.Linear(12, 8)]


def _without_biases() -> list:
    return [ops.Linear(8, 12, bias=False), ops.SiLU(), ops.Linear(12, 8, bias=False), ops.Tanh()]


def _scaled_residual() -> list:
    return [ops.Residual(ops.Linear(8, 8, bias=False), ops.ConstantScale(0.5)), ops.Sigmoid()]


def _linear_residual() -> list:
    return [ops.LayerNorm(8), ops.Residual(ops.Linear(8, 8)), ops.RMSNorm(8)]


def _dropouts() -> list:
    return [ops.Residual(ops.LayerNorm(8), ops.Linear(8, 8), ops.Dropout(0.5)), ops.Dropout(0.2), ops.Linear(8, 3)]


def _post_norm() -> list:
    """Norms behind the residual, as in the first transformers, with dropout."""
    return [ops.Residual(ops.Linear(8, 8), ops.Dropout(0.3)), ops.LayerNorm(8), ops.Bias(8), ops.GELU()]


def _channels() -> list:
    """One producer, three consumers, one of which gets it through a split."""
    return [
        ops.Linear(8, 8),
        ops.MakeExtraOutput("a", keep=True),
        ops.Tanh(),
        ops.AddExtraInput("a"),
        ops.Linear(8, 8, bias=False),
        ops.AddExtraInput("a"),
        torch.nn.Softplus(),
        ops.AddExtraInput("a"),
    ]


def _extras() -> list:
    """Extra inputs by position, one of them twice the input of a residual, and an extra output."""
    return [
        ops.AddExtraInput(),
        ops.Residual(ops.MakeExtraOutput(), ops.Linear(8, 8), ops.AddExtraInput()),
        ops.GELU(),
    ]


def _split() -> list:
    return [
        ops.Linear(8, 12),
        ops.ReLU(),
        torch.nn.Sequential(torch.nn.Unflatten(-1, (3, 4)), torch.nn.Flatten(-2)),
        ops.Linear(12, 8),
        ops.SReLU(),
    ]


def _reshaped() -> list:
    return [ops.Linear(8, 12), ops.Reshape((-1, 4)), ops.L2Normalization(), ops.Linear(4, 6), ops.GLU()]


def _attention() -> list:
    return [
        ops.Residual(
            ops.RMSNorm(8), ops.Linear(8, 16), ops.Rotary(4, 3), ops.Attention(2, 1, causal=True), ops.Linear(8, 8)
        ),
        ops.PositionEmbedding(64, 8),
    ]


def _loss() -> list:
    """A classifier: takes targets besides x."""
    return [ops.RMSNorm(8), ops.Linear(8, 5), ops.CrossEntropy(label_smoothing=0.1)]


BLOCKS: dict[str, Callable[[], list]] = {
    make.__name__.strip("_"): make
    for make in (
        _mlp,
        _gated_mlp,
        _twins,
        _pair_mlp,
        _two_layers,
        _relu_mlp,
        _without_biases,
        _scaled_residual,
        _linear_residual,
        _dropouts,
        _post_norm,
        _channels,
        _extras,
        _split,
        _reshaped,
        _attention,
        _loss,
    )
}


def make(name: str, rules: RuleSet | None = None, dtype: torch.dtype = torch.float64) -> fusible.Sequential:
    """A standard block with parameters that are neither zero nor one."""
    torch.manual_seed(7)
    block = fusible.Sequential(*BLOCKS[name](), rules=rules).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.5)
    return block


def inputs(name: str, dtype: torch.dtype = torch.float64, leading: tuple[int, ...] = (3,)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(8)
    leading = leading or (1,) if name == "attention" else leading  # which needs a dimension of length
    count = 3 if name == "extras" else 1
    made = [torch.randn(*leading, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]
    return [*made, torch.randint(0, 5, leading, generator=generator)] if name == "loss" else made


def fired(block: fusible.Sequential, *tensors: Tensor, **named: Tensor) -> set[str]:
    """The names of the rules that run when x and the extra inputs want a gradient."""
    explanation = block.explain(*[t.detach().requires_grad_(t.is_floating_point()) for t in tensors], **named)
    rows = [row.rule for part in explanation.parts for row in (*part.forward, *part.backward)]
    notes = [note.split(": ")[1] for part in explanation.parts for note in part.notes if note.startswith("rewritten")]
    return {*rows, *notes} - {""}
