"""The table of ops: one row per op and set of options. A row makes its op join every test of `test_ops.py`.

    Row(ops.Scale, 6, formula=lambda op, x: x * op.g, errors={(3, 5): "g has 6 elements but x's last dimension is 5"})

A row has the op and its arguments; the shape of x that it takes, of which the trailing dimensions are the op's own and
the leading ones vary; the formula, for an op without a `torch.nn` twin, in elementary torch and independent of fusible;
and the errors of shapes that do not fit, by text. An argument that is a function is called: it makes a module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

import fusible
from fusible import ops

F64 = torch.float64
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGER = "must have a floating dtype, got torch.int64; convert it first"
COMPLEX = "must have a floating dtype, got torch.complex64; convert it first"


class Row:
    """One op with one set of options.

    Attributes:
        x: the shape of x.
        own: how many of its trailing dimensions belong to the op.
        formula: `f(op, x, *extra_inputs)`, the truth of an op that has no twin.
        errors: the text that a shape of x raises.
        training: False for an op in evaluation.
        any_dtype: whether x may be an integer.
        refuses: pairs of a dtype that x must not have and the text that it raises.
        given: `f(shape of x)` makes x and the extra inputs, where they are not all floating tensors of x's shape.
    """

    def __init__(
        self,
        kind: type,
        *args: Any,
        x: tuple[int, ...] = (3, 6),
        own: int = 1,
        formula: Callable[..., Any] | None = None,
        errors: Mapping[tuple[int, ...], str] | None = None,
        training: bool = True,
        any_dtype: bool = False,
        refuses: Iterable[tuple[torch.dtype, str]] = ((torch.int64, INTEGER), (torch.complex64, COMPLEX)),
        given: Callable[[tuple[int, ...]], list[Tensor]] | None = None,
        **options: Any,
    ) -> None:
        self.kind, self.args, self.options = kind, args, options
        self.x, self.own, self.formula, self.errors = x, own, formula, dict(errors or {})
        self.training, self.any_dtype = training, any_dtype
        self.refuses, self.given = tuple(refuses), given

    @property
    def twin(self) -> type[torch.nn.Module] | None:
        """The `torch.nn` class that this op is, options of its own aside."""
        twins = {op: twin for twin, op in ops.TWINS.items()}
        return None if self.formula else twins.get(self.kind)

    @property
    def num_extras(self) -> int:
        return len(self.names)

    @property
    def names(self) -> tuple[str | None, ...]:
        """The names of the extra inputs."""
        return self.op().present_inputs() if issubclass(self.kind, fusible.Op) else ()

    def construct(self, kind: type) -> Any:
        """`kind` with this row's arguments, in this row's mode."""
        args = [arg() if isinstance(arg, FunctionType) else arg for arg in self.args]
        return kind(*args, **self.options).train(self.training)

    def op(self, dtype: torch.dtype = torch.float64) -> Any:
        """The op, with parameters that are neither zero nor one."""
        torch.manual_seed(1)
        op = self.construct(self.kind).to(dtype)
        for parameter in op.parameters():
            torch.nn.init.normal_(parameter, 0.3, 0.5)
        return op

    def block(self, dtype: torch.dtype = torch.float64, **options: Any) -> fusible.Sequential:
        inputs = [name for name in self.names if name is not None]
        return fusible.Sequential(self.op(dtype), inputs=inputs, **options)

    def inputs(self, dtype: torch.dtype = torch.float64, leading: tuple[int, ...] | None = None) -> list[Tensor]:
        """x and the extra inputs, with other leading dimensions if given."""
        shape = self.x if leading is None else (*leading, *self.x[len(self.x) - self.own :])
        if self.given:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(2)
                return [t.to(dtype) if t.is_floating_point() else t for t in self.given(shape)]
        generator = torch.Generator().manual_seed(2)
        count = 1 + self.num_extras
        return [(torch.randn(shape, generator=generator, dtype=torch.float64) * 1.5).to(dtype) for _ in range(count)]

    def named(self, tensors: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Inputs as a call takes them: by position, and the ones that have a name by keyword."""
        names = [name for name in self.names if name is not None]
        first = len(tensors) - len(names)
        return tensors[:first], dict(zip(names, tensors[first:], strict=True))

    def __str__(self) -> str:
        args = [arg()._get_name() if isinstance(arg, FunctionType) else str(arg) for arg in self.args]
        options = [f"{name}={value}" for name, value in self.options.items()]
        mode = "" if self.training else " eval"
        return f"{self.kind.__name__}({', '.join([*args, *options])}){mode}".replace(" ", "")


# -- formulas ----------------------------------------------------------------------------------------------------------


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


def squared_relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0) ** 2


def gated(formula: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A formula of the two halves of x, picked out by index."""

    def of(op: Any, x: Tensor) -> Tensor:
        width = x.shape[-1]
        odd = torch.arange(width) // (op.interleave or width // 2) % 2 == 1
        halves = (x[..., ~odd], x[..., odd])
        return formula(op, *(halves if op.gate_first else halves[::-1]))

    return of


def clamped(op: Any, a: Tensor, b: Tensor) -> Tensor:
    a = torch.where(a > op.limit, op.limit, a)
    b = torch.where(b > op.limit, op.limit, torch.where(b < -op.limit, -op.limit, b))
    return a * sigmoid(op.alpha * a) * (b + op.offset)


def situ(op: Any, a: Tensor, b: Tensor) -> Tensor:
    return op.beta1 * torch.tanh(a / op.beta1) * sigmoid(a) * op.beta2 * torch.tanh(b / op.beta2)


def layer_norm(op: Any, x: Tensor) -> Tensor:
    dims = tuple(range(-len(op.normalized_shape), 0))
    centred = x - x.mean(dims, keepdim=True)
    scaled = centred / torch.sqrt((centred**2).mean(dims, keepdim=True) + op.eps)
    return scaled * (1 + op.weight) + (0 if op.bias is None else op.bias)


def rms_norm(op: Any, x: Tensor) -> Tensor:
    dims = tuple(range(-len(op.normalized_shape), 0))
    return x / torch.sqrt((x**2).mean(dims, keepdim=True) + op.eps) * (1 + op.weight)


def qk_norm(op: Any, x: Tensor) -> Tensor:
    heads = list(x.unflatten(-1, (-1, op.head_dim)).unbind(-2))
    for number in range(op.heads + op.kv_heads):
        weight = op.q_weight if number < op.heads else op.k_weight
        heads[number] = heads[number] / torch.sqrt((heads[number] ** 2).mean(-1, keepdim=True) + op.eps) * weight
    return torch.cat(heads, -1)


def rotary(op: Any, x: Tensor, positions: Tensor | None = None) -> Tensor:
    """By multiplication of complex numbers."""
    r = op.rotary_dim
    at = torch.arange(x.shape[-2]) if positions is None else positions
    angles = at.double()[..., None, None] * op.base ** (-torch.arange(0, r, 2).double() / r)  # [..., t, 1, r/2]
    heads = x.unflatten(-1, (-1, op.head_dim))
    first = heads[..., : op.heads, :r]
    pairs = first.unflatten(-1, (-1, 2)) if op.interleaved else first.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    first = turned.flatten(-2) if op.interleaved else turned.transpose(-1, -2).flatten(-2)
    first = torch.cat((first, heads[..., : op.heads, r:]), -1)
    return torch.cat((first, heads[..., op.heads :, :]), -2).flatten(-2)


def attention(op: Any, x: Tensor, *extras: Tensor) -> Tensor:
    """Head by head, with all scores at once."""
    mask = extras[0] if op.mask else None
    borders = extras[-1] if op.cu_seqlens else None
    h, g, t = op.heads, op.kv_heads, x.shape[-2]
    heads = x.unflatten(-1, (h + 2 * g, -1)).unbind(-2)
    i, j = torch.arange(t)[:, None], torch.arange(t)
    seen = torch.ones(t, t, dtype=torch.bool) if not op.causal else j <= i
    if op.window:
        seen = seen & (j > i - op.window) & (j < i + op.window)
    if borders is not None:
        number = (j[:, None] >= borders[1:]).sum(1)
        seen = seen & (number[:, None] == number)
    outs = []
    for number in range(h):
        q, k, v = heads[number], heads[h + number * g // h], heads[h + g + number * g // h]
        s = q @ k.transpose(-1, -2) * (op.scale or q.shape[-1] ** -0.5)
        s = op.soft_cap * torch.tanh(s / op.soft_cap) if op.soft_cap else s
        own = seen
        if mask is not None:
            m = mask.expand(*mask.shape[:-3], h, *mask.shape[-2:])[..., number, :, :] if mask.dim() > 2 else mask
            own, s = (seen & m, s) if m.dtype is torch.bool else (seen, s + m)
        e = torch.where(own, torch.exp(s), 0)
        outs.append(e / e.sum(-1, keepdim=True).clamp(min=1e-300) @ v)
    return torch.cat(outs, -1)


def cross_entropy(op: Any, x: Tensor, target: Tensor) -> Tensor:
    """By probabilities and a one-hot target, smoothed."""
    z = x if op.soft_cap is None else op.soft_cap * torch.tanh(x / op.soft_cap)
    classes = x.shape[-1]
    weight = torch.ones(classes, dtype=x.dtype) if op.class_weight is None else op.class_weight
    hit = (torch.arange(classes) == target[..., None]).to(x.dtype)
    total = torch.exp(z).sum(-1)
    log_p = torch.log(torch.exp(z) / total[..., None])
    wanted = hit * (1 - op.label_smoothing) + op.label_smoothing / classes
    of_row = (hit * weight).sum(-1)  # 0 where the target is ignored
    losses = -(wanted * weight * log_p).sum(-1) + op.z_loss * of_row * torch.log(total) ** 2
    losses = losses * (target != op.ignore_index)
    if op.reduction == "none":
        return losses
    return losses.sum() / of_row.sum() if op.reduction == "mean" else losses.sum()


def linear_cross_entropy(op: Any, x: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(op, x @ op.weight.T + (0 if op.bias is None else op.bias), target)


def with_targets(shape: tuple[int, ...]) -> list[Tensor]:
    """x, and targets of five classes, of which the second is ignored."""
    target = torch.randint(0, 5, shape[:-1])
    if target.numel() > 1:
        target.view(-1)[1] = -100
    return [torch.randn(shape, dtype=torch.float64) * 1.5, target]


# -- the table ---------------------------------------------------------------------------------------------------------


def _errors(text: str, width: int = 5) -> dict[tuple[int, ...], str]:
    """`text` for a wrong last dimension, in rank 1 and 2."""
    return {shape: text + f" (x: {list(shape)})" for shape in ((width,), (8, width))}


#: Options of a loss, one by one and all.
CLASS_WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25, 0.0])
LOSSES: list[dict[str, Any]] = [
    {},
    {"reduction": "none", "label_smoothing": 0.2},
    {"class_weight": CLASS_WEIGHT, "z_loss": 0.1, "label_smoothing": 0.3, "soft_cap": 2.0, "name": "targets"},
    {"reduction": "sum", "class_weight": CLASS_WEIGHT},
    {"reduction": "none", "class_weight": CLASS_WEIGHT, "z_loss": 0.1, "label_smoothing": 1.0, "soft_cap": 2.0},
]
TARGETS = "the targets must have x's shape without its last dimension, [8], but have [3]; reshape them"


FEATURES = _errors("weight takes 6 features but x's last dimension is 5")
WEIGHT = _errors("weight has 6 elements but x's last dimension is 5")
HALVES = _errors("x's last dimension must be even, two halves, but is 5")
TOKENS = [(dtype, f"must have dtype int64 or int32, got {dtype}; pass the numbers of tokens")
          for dtype in (torch.float32, torch.bool)]  # fmt: skip
BLOCKS = _errors("x's last dimension must be a multiple of 4, two blocks of interleave=2, but is 6", 6)


def _gated(kind: type, formula: Callable[..., Tensor], *args: Any, **options: Any) -> list[Row]:
    """A gated op in its four layouts."""
    formula = gated(formula)
    return [
        Row(kind, *args, formula=formula, errors=HALVES, **options),
        Row(kind, *args, formula=formula, gate_first=False, **options),
        Row(kind, *args, formula=formula, x=(3, 8), interleave=2, errors=BLOCKS, **options),
        Row(kind, *args, formula=formula, x=(3, 6), interleave=1, gate_first=False, **options),
    ]


ROWS = [
    Row(ops.Linear, 6, 4, errors=FEATURES),
    Row(ops.Linear, 6, 5, bias=False, errors=FEATURES),
    Row(ops.Linear, 1, 1, x=(3, 1)),
    Row(ops.BasicLinear, 6, 4, formula=lambda op, x: x @ op.weight.T, errors=FEATURES),
    Row(ops.Bias, 6, formula=lambda op, x: x + op.bias,
        errors=_errors("bias has 6 elements but x's last dimension is 5")),
    Row(ops.PairLinear, 6, 4, formula=lambda op, x: torch.cat([x @ op.first.T, x @ op.second.T], -1),
        errors={(5,): "first takes 6 features but x's last dimension is 5 (x: [5])"}),
    Row(ops.LayerNorm, 6, errors=WEIGHT),
    Row(ops.LayerNorm, 6, eps=0.1, bias=False),
    Row(ops.LayerNorm, 6, elementwise_affine=False,
        errors=_errors("normalized_shape has 6 elements but x's last dimension is 5")),
    Row(ops.LayerNorm, (2, 3), x=(4, 2, 3), own=2,
        errors={(4, 3, 2): "weight has shape [2, 3] but x's last dimensions are [3, 2] (x: [4, 3, 2])"}),
    Row(ops.LayerNorm, 7, x=(3, 7), zero_centered_gamma=True, formula=layer_norm),
    Row(ops.LayerNorm, 7, x=(3, 7), bias=False, zero_centered_gamma=True, formula=layer_norm),
    Row(ops.RMSNorm, 6, errors=WEIGHT),
    Row(ops.RMSNorm, 6, eps=0.1),
    Row(ops.RMSNorm, 6, elementwise_affine=False),
    Row(ops.RMSNorm, (2, 3), x=(4, 2, 3), own=2,
        errors={(3,): "weight has shape [2, 3] but x's last dimensions are [3] (x: [3])"}),
    Row(ops.RMSNorm, 7, eps=1e-3, x=(3, 7), zero_centered_gamma=True, formula=rms_norm),
    Row(ops.L2Normalization, formula=lambda op, x: x / torch.sqrt((x**2).sum(-1, keepdim=True) + 1e-6)),
    Row(ops.L2Normalization, eps=0.1, x=(3, 1),
        formula=lambda op, x: x / torch.sqrt((x**2).sum(-1, keepdim=True) + 0.1)),
    Row(ops.GELU),
    Row(ops.GELU, approximate="tanh"),
    Row(ops.QGELU, formula=lambda op, x: x * sigmoid(1.702 * x)),
    Row(ops.ReLU),
    Row(ops.ReLU, inplace=True),
    Row(ops.SReLU, formula=lambda op, x: squared_relu(x)),
    Row(ops.SiLU),
    Row(ops.SiLU, inplace=True),
    Row(ops.Sigmoid),
    Row(ops.Tanh),
    Row(ops.GLU, errors=HALVES),
    *_gated(ops.SwiGLU, lambda op, a, b: a * sigmoid(a) * b),
    *_gated(ops.GEGLU, lambda op, a, b: gelu(a) * b),
    *_gated(ops.GEGLU, lambda op, a, b: gelu(a, "tanh") * b, approximate="tanh"),
    *_gated(ops.QGEGLU, lambda op, a, b: a * sigmoid(1.702 * a) * b),
    *_gated(ops.ReGLU, lambda op, a, b: torch.where(a > 0, a, 0) * b),
    *_gated(ops.SReGLU, lambda op, a, b: squared_relu(a) * b),
    *_gated(ops.ClampedSwiGLU, clamped, 0.7, 1.5, offset=0.5),
    Row(ops.ClampedSwiGLU, formula=gated(clamped)),
    *_gated(ops.SiTUGLU, situ),
    Row(ops.SiTUGLU, beta1=0.5, beta2=2.0, formula=gated(situ)),
    *[Row(ops.CrossEntropy, x=(3, 5), given=with_targets, formula=cross_entropy, errors={(8, 5): TARGETS}, **options)
      for options in LOSSES],
    *[Row(ops.LinearCrossEntropy, 6, 5, given=with_targets, formula=linear_cross_entropy, errors=FEATURES, **options)
      for options in LOSSES[:3]],
    *[Row(ops.LinearCrossEntropy, 6, 5, bias=True, given=with_targets, formula=linear_cross_entropy, **options)
      for options in LOSSES[1::2]],
    Row(ops.Dropout, 0),
    Row(ops.Dropout),
    Row(ops.Dropout, 0.25, inplace=True),
    Row(ops.Dropout, 1),
    Row(ops.Dropout, training=False, any_dtype=True),
    Row(ops.ConstantScale, 0.3, formula=lambda op, x: 0.3 * x),
    Row(ops.ConstantScale, 0, formula=lambda op, x: 0 * x),
    Row(ops.Identity, any_dtype=True),
    Row(ops.Reshape, (-1, 3), any_dtype=True, formula=lambda op, x: x.reshape(-1, 3),
        errors={(2, 5): "shape [-1, 3] holds multiples of 3 elements but x has 10 (x: [2, 5])"}),
    Row(ops.Reshape, (-1,), any_dtype=True, formula=lambda op, x: x.flatten()),
    Row(ops.AddExtraInput, formula=lambda op, x, extra: x + extra),
    Row(ops.AddExtraInput, "r", formula=lambda op, x, extra: x + extra),
    Row(ops.MakeExtraOutput, any_dtype=True, formula=lambda op, x: (x, x)),
    Row(ops.MakeExtraOutput, "r", keep=True, any_dtype=True, formula=lambda op, x: (x, x)),
    Row(ops.QKNorm, 3, 2, x=(4, 18), formula=qk_norm,
        errors=_errors("x's last dimension must be 6 heads of 3, but is 5")),
    Row(ops.QKNorm, 5, 4, 2, x=(4, 40), eps=0.1, formula=qk_norm),
    Row(ops.Rotary, 6, 2, x=(2, 5, 18), own=2, formula=rotary, errors={
        (5, 20): "x's last dimension must be whole heads of 6, at least 2 of them, but is 20 (x: [5, 20])",
        (5, 6): "x's last dimension must be whole heads of 6, at least 2 of them, but is 6 (x: [5, 6])",
        (18,): "x must have a dimension of positions before its last, [..., t, width] (x: [18])"}),
    Row(ops.Rotary, 6, 3, x=(2, 5, 18), own=2, interleaved=True, base=100.0, formula=rotary),
    Row(ops.Rotary, 6, 1, x=(2, 5, 18), own=2, rotary_dim=4, formula=rotary),
    Row(ops.Rotary, 6, 2, x=(2, 5, 18), own=2, rotary_dim=2, interleaved=True, positions="p", formula=rotary,
        given=lambda shape: [torch.randn(shape, dtype=F64), torch.randint(0, 9, shape[:-1])]),
    Row(ops.Rotary, 6, 2, x=(2, 5, 18), own=2, positions="p", formula=rotary,
        given=lambda shape: [torch.randn(shape, dtype=F64), torch.tensor([4, 0, 1, 7, 4])]),
    Row(ops.Attention, 2, x=(2, 5, 12), own=2, formula=attention, errors={
        (5, 10): "x's last dimension must be 6 whole heads, 2 of queries and 2 each of keys and values, but is 10 (x: "
                 "[5, 10])",
        (12,): "x must have a dimension of length before its last, [..., t, width] (x: [12])"}),
    Row(ops.Attention, 4, 2, x=(2, 5, 16), own=2, causal=True, scale=0.4, formula=attention),
    Row(ops.Attention, 2, 1, x=(2, 5, 12), own=2, causal=True, window=2, formula=attention),
    Row(ops.Attention, 2, 1, x=(2, 5, 12), own=2, window=3, formula=attention),
    Row(ops.Attention, 4, 2, x=(2, 5, 16), own=2, causal=True, soft_cap=2.0, formula=attention),
    Row(ops.Attention, 2, x=(2, 5, 6), own=2, head_dim=1, dropout=0.3, training=False, formula=attention, errors={
        (5, 12): "x's last dimension must be 6 heads of 1, 2 of queries and 2 each of keys and values, but is 12 (x: "
                 "[5, 12])"}),
    Row(ops.Attention, 4, 2, x=(2, 5, 16), own=2, mask="m", formula=attention,
        given=lambda shape: [torch.randn(shape, dtype=F64), torch.randn(4, 5, 5, dtype=F64)]),
    Row(ops.Attention, 2, x=(2, 5, 12), own=2, mask="m", causal=True, formula=attention,
        given=lambda shape: [torch.randn(shape, dtype=F64), torch.rand(*shape[:-2], 1, 5, 5) > 0.4]),
    Row(ops.Attention, 2, 1, x=(2, 5, 12), own=2, cu_seqlens="c", causal=True, formula=attention,
        given=lambda shape: [torch.randn(shape, dtype=F64), torch.tensor([0, 2, 2, 5])]),
    Row(ops.Embedding, 7, 4, x=(2, 3), refuses=TOKENS, given=lambda shape: [torch.randint(0, 7, shape)]),
    Row(ops.Embedding, 7, 4, padding_idx=2, x=(2, 3), refuses=TOKENS,
        given=lambda shape: [torch.randint(3, 7, shape, dtype=torch.int32)]),
    Row(ops.PositionEmbedding, 7, 4, x=(2, 5, 4), own=2, formula=lambda op, x: x + op.weight[: x.shape[-2]], errors={
        (5, 3): "weight has 4 elements but x's last dimension is 3 (x: [5, 3])",
        (8, 4): "there are 7 positions but x has 8 places (x: [8, 4])",
        (4,): "x must have a dimension of positions before its last, [..., t, width] (x: [4])"}),
    Row(ops.PositionEmbedding, 7, 4, x=(2, 5, 4), own=2, positions="p", formula=lambda op, x, p: x + op.weight[p],
        given=lambda shape: [torch.randn(shape, dtype=F64), torch.randint(0, 7, shape[:-1])]),
    Row(ops.Residual, lambda: ops.Linear(6, 6), lambda: ops.Tanh(),
        formula=lambda op, x: x + torch.tanh(x @ op[0].weight.T + op[0].bias)),
    Row(ops.Residual, lambda: ops.Residual(ops.Sigmoid()), lambda: ops.Dropout(0.5).eval(), training=False,
        formula=lambda op, x: x + x + sigmoid(x)),
    Row(ops.Residual, formula=lambda op, x: x + x),
]  # fmt: skip
