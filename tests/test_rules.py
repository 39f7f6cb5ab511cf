"""Every shipped rule fires and is refused by its reason; users' rules: patterns, precedence, what they get wrong."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from blocks import SHIPPED
from torch import Tensor

import fusible
from fusible import Grads, Op, Out, RuleSet, backward, forward, kernels, ops, reads_for, rewrite, rules, use_rules
from fusible.kernels import library
from fusible.ops import GELU, AddExtraInput, BasicLinear, Bias, MakeExtraOutput, ReLU, SiLU
from fusible.testing import check, check_rule

F32, F64, BF16, I64 = torch.float32, torch.float64, torch.bfloat16, torch.int64


class Case(NamedTuple):
    """A rule on a chain. It fires, unless `text` is the reason why not.

    `change` is made to the chain in a list; x has 6 features; `grad` is the grad mode, `backend` the forced one.
    """

    rule: str
    chain: Callable[[], list]
    text: str = ""
    change: Callable[[list], object] = lambda chain: None
    x: torch.dtype = F64
    extras: tuple[torch.dtype, ...] = ()
    grad: bool = True
    backend: str | None = None


class Opaque(Op):
    """Needs its data to tell its output's shape."""

    def reference(self, x):
        return x * float(x.detach().sum() > 0)


def linear(bias: bool = True) -> ops.Linear:
    return ops.Linear(6, 6, bias=bias).double()


def freeze(chain: list, name: str, at: int = 0) -> None:
    getattr(chain[at], name).requires_grad_(False)


FROZEN = "the weight is frozen, so its input is not kept anyway: let it require grad"
NARROW_BIAS = "Bias is torch.float32, Linear computes in torch.float64: give both one dtype"
NARROW_X = "x is torch.float32, the weight torch.float64 and the result torch.float64: make x torch.float64"


def narrow_bias(chain: list) -> None:
    chain[0].bias.data = chain[0].bias.data.float()


NARROW_EXTRA = "the extra input is torch.float32, Linear computes in torch.float64: make the extra input torch.float64"
READS_INPUT = (
    "backward of GELU reads its input, so GELU cannot write over it: one whose backward reads its output can (ReLU, "
    "Sigmoid, Tanh), and any can where no gradient is wanted"
)
ONE_PASS = "no kernel here gives gradient and output in one pass: rules.LEAN does it in two"
TWO_DTYPES = "the extra input is torch.float32, the stream torch.float64: make the extra input torch.float64"


def recomputed(suffix: str) -> list[Case]:
    """The cases that a rule of `LEAN` and its twin of `DEFAULT` share."""
    activation, norm = f"activation_linear_{suffix}", f"norm_linear_{suffix}"
    pair = f"norm_pair_{suffix}"
    gated = (ops.SwiGLU, ops.GEGLU, ops.QGEGLU, ops.ReGLU, ops.SReGLU, ops.GLU, ops.ClampedSwiGLU, ops.SiTUGLU)
    return [
        *[Case(activation, lambda act=act: [act(), ops.Linear(6, 4).double()])
          for act in (ops.GELU, ops.QGELU, ops.SReLU, ops.SiLU)],
        *[Case(activation, lambda act=act: [act(), ops.Linear(3, 4, bias=False).double()]) for act in gated],
        Case(activation, lambda: [ops.GELU(), linear()], FROZEN,
             lambda chain: freeze(chain, "weight", 1)),
        Case(activation, lambda: [ops.GELU(), linear()], NARROW_X, x=F32),
        Case(activation, lambda: [ops.Bias(6).double(), ops.GELU(), linear()]),
        Case(activation, lambda: [linear(), ops.SwiGLU(), ops.Linear(3, 4).double()]),
        *[Case(norm, lambda kind=kind: [kind(6).double(), linear()]) for kind in (ops.RMSNorm, ops.LayerNorm)],
        *[Case(norm, lambda kind=kind: [ops.MakeExtraOutput(), kind(6, zero_centered_gamma=True).double(), linear()])
          for kind in (ops.RMSNorm, ops.LayerNorm)],
        Case(norm, lambda: [ops.Residual(ops.LayerNorm(6, bias=False).double(), linear())]),
        Case(norm, lambda: [ops.RMSNorm((3, 6), elementwise_affine=False), linear()]),
        Case(norm, lambda: [ops.LayerNorm((3, 6)).double(), linear()]),
        Case(norm, lambda: [ops.RMSNorm(6).double(), linear()], FROZEN,
             lambda chain: freeze(chain, "weight", 1)),
        Case(norm, lambda: [ops.RMSNorm(6).double(), linear()], NARROW_X, x=F32),
        Case(pair, lambda: [ops.RMSNorm(6).double(), ops.PairLinear(6, 4).double()]),
        Case(pair, lambda: [ops.MakeExtraOutput(), ops.LayerNorm(6).double(), ops.PairLinear(6, 4).double()]),
        Case(pair, lambda: [ops.RMSNorm(6).double(), ops.PairLinear(6, 4).double()],
             "both weights are frozen, so their input is not kept anyway",
             lambda chain: (freeze(chain, "first", 1), freeze(chain, "second", 1))),
        Case(pair, lambda: [ops.RMSNorm(6).double(), ops.PairLinear(6, 4).double()],
             "x is torch.float32, the weight torch.float64 and the result torch.float64: use one dtype", x=F32),
    ]  # fmt: skip


CASES = [
    Case("linear_bias", lambda: [linear()]),
    Case("linear_bias", lambda: [ops.BasicLinear(6, 6).double(), ops.Bias(6).double()]),
    Case("linear_bias", lambda: [torch.nn.Linear(6, 5)], x=F32),
    Case("linear_bias", lambda: [linear()], NARROW_BIAS, narrow_bias),
    Case("linear_activation", lambda: [linear(), ops.ReLU()]),
    Case("linear_activation", lambda: [linear(bias=False), ops.Sigmoid()]),
    Case("linear_activation", lambda: [linear(), ops.Tanh()], grad=False),
    Case("linear_activation", lambda: [linear(), ops.GELU("tanh")], grad=False),
    Case("linear_activation", lambda: [linear(bias=False), ops.QGELU()], grad=False),
    Case("linear_activation", lambda: [linear(), ops.SReLU()], grad=False),
    Case("linear_activation", lambda: [linear(), ops.SiLU()], grad=False),
    Case("linear_activation", lambda: [linear(), ops.GELU()],
         READS_INPUT),
    Case("linear_activation", lambda: [linear(), ops.ReLU()], NARROW_BIAS, narrow_bias),
    Case("linear_add", lambda: [linear(), ops.AddExtraInput()], extras=(F64,)),
    Case("linear_add", lambda: [linear(bias=False), ops.AddExtraInput()], extras=(F64,)),
    Case("linear_add", lambda: [ops.Residual(ops.Identity(), linear())]),
    Case("linear_add", lambda: [linear(), ops.AddExtraInput()], NARROW_BIAS, narrow_bias, extras=(F64,)),
    Case("linear_add", lambda: [linear(), ops.AddExtraInput()],
         NARROW_EXTRA, extras=(F32,)),
    *[Case("add_norm", lambda norm=norm: [ops.AddExtraInput(), ops.MakeExtraOutput(), norm(6).double()], extras=(F64,))
      for norm in (ops.RMSNorm, ops.LayerNorm)],
    Case("add_norm", lambda: [ops.AddExtraInput(), ops.RMSNorm(6, zero_centered_gamma=True).double()], extras=(F64,)),
    Case("add_norm", lambda: [ops.AddExtraInput(), ops.LayerNorm((3, 6), elementwise_affine=False)], extras=(F64,)),
    Case("add_norm", lambda: [ops.AddExtraInput(), ops.RMSNorm(6).double()],
         TWO_DTYPES, extras=(F32,)),
    Case("linear_add_norm", lambda: [linear(), ops.AddExtraInput(), ops.RMSNorm(6).double()], extras=(F64,)),
    Case("linear_add_norm", lambda: [ops.Residual(linear(bias=False)), ops.Residual(ops.LayerNorm(6).double())]),
    Case("linear_add_norm", lambda: [linear(), ops.AddExtraInput(), ops.RMSNorm(6).double()],
         NARROW_EXTRA, extras=(F32,)),
    Case("linear_add_norm", lambda: [linear(), ops.AddExtraInput(), ops.RMSNorm(6).double()], NARROW_BIAS, narrow_bias,
         extras=(F64,)),
    Case("linear_scale_add", lambda: [linear(bias=False), ops.ConstantScale(0.3), ops.AddExtraInput()], extras=(F64,)),
    Case("linear_scale_add", lambda: [ops.Residual(linear(bias=False), ops.ConstantScale(-2))]),
    Case("linear_scale_add", lambda: [linear(bias=False), ops.ConstantScale(0.3), ops.AddExtraInput()],
         NARROW_EXTRA, extras=(F32,)),
    *[Case("bias_activation", lambda act=act: [ops.Bias(6).double(), act()])
      for act in (ops.GELU, ops.QGELU, ops.ReLU, ops.SReLU, ops.SiLU, ops.Sigmoid, ops.Tanh)],
    Case("bias_activation", lambda: [linear(), ops.GELU()]),
    Case("bias_activation", lambda: [linear(), ops.GELU()],
         "the bias is frozen, so there is no gradient to sum: let it require grad",
         lambda chain: freeze(chain, "bias")),
    Case("linear_rotary", lambda: [linear(), ops.Rotary(2, 2)]),
    Case("linear_rotary", lambda: [linear(bias=False), ops.Rotary(2, 3, interleaved=True)], grad=False),
    Case("linear_rotary", lambda: [torch.nn.Linear(6, 12), ops.Rotary(4, 2, rotary_dim=2)], x=F32),
    Case("linear_rotary", lambda: [linear(), ops.Rotary(2, 2)], NARROW_BIAS, narrow_bias),
    Case("dattention_rotary", lambda: [ops.Rotary(2, 2), ops.Attention(1, causal=True)]),
    Case("dattention_rotary", lambda: [ops.Rotary(2, 3, interleaved=True), ops.Attention(1, soft_cap=3.0)]),
    Case("dattention_rotary", lambda: [ops.Rotary(2, 2), ops.Attention(1, window=2)], x=F32),
    Case("dattention_rotary", lambda: [ops.Rotary(6, 1), ops.Attention(1)],
         "Rotary turns heads of 6, Attention has heads of another size: give both one size"),
    Case("dlinear_add", lambda: [ops.MakeExtraOutput(), linear()]),
    Case("dlinear_add", lambda: [ops.Residual(linear(bias=False))]),
    Case("dlinear_add", lambda: [ops.MakeExtraOutput(), linear()], NARROW_X, x=F32),
    Case("dlinear_scale", lambda: [linear(bias=False), ops.ConstantScale(0.3)]),
    Case("dlinear_scale", lambda: [linear(bias=False), ops.ConstantScale(0.3)], NARROW_X, x=F32),
    Case("dresidual_rms_norm", lambda: [ops.Residual(ops.RMSNorm(6).double(), ops.Tanh())]),
    Case("dresidual_rms_norm", lambda: [ops.MakeExtraOutput(), ops.RMSNorm(6, zero_centered_gamma=True).double()]),
    Case("dresidual_rms_norm", lambda: [ops.MakeExtraOutput(), ops.RMSNorm((3, 6), elementwise_affine=False)]),
    Case("dresidual_rms_norm", lambda: [Opaque(), ops.MakeExtraOutput(), ops.RMSNorm(6).double()],
         "shapes behind Opaque (op 0) are unknown, as its formula cannot be asked without data: give Opaque a method "
         "infer"),
    Case("dresidual_layer_norm", lambda: [ops.Residual(ops.LayerNorm(6).double(), ops.Tanh())]),
    Case("dresidual_layer_norm", lambda: [ops.MakeExtraOutput(), ops.LayerNorm(6, bias=False).double()]),
    Case("dresidual_layer_norm", lambda: [ops.MakeExtraOutput(), ops.LayerNorm((3, 6)).double()]),
    Case("dresidual_layer_norm", lambda: [Opaque(), ops.MakeExtraOutput(), ops.LayerNorm(6).double()],
         "shapes behind Opaque (op 0) are unknown, as its formula cannot be asked without data: give Opaque a method "
         "infer"),
    *recomputed("recompute"),
    *(recomputed("onepass") if library.load() else []),
    Case("activation_linear_onepass", lambda: [ops.GELU(), linear()], ONE_PASS, backend="reference"),
    Case("norm_pair_onepass", lambda: [ops.RMSNorm(6).double(), ops.PairLinear(6, 4).double()], ONE_PASS,
         backend="reference"),
    Case("norm_linear_onepass", lambda: [ops.RMSNorm(6).double(), linear()], ONE_PASS, backend="reference"),
    *[Case("bias_act", lambda act=act: [ops.Bias(6).double(), act()])
      for act in (ops.GELU, ops.QGELU, ops.ReLU, ops.SReLU, ops.SiLU, ops.Sigmoid, ops.Tanh, ops.SwiGLU, ops.GLU)],
    Case("bias_act", lambda: [ops.Bias(6), ops.GELU("tanh")], x=BF16),
    Case("bias_act", lambda: [ops.Bias(6).double(), ops.GELU()], grad=False),
    Case("bias_act", lambda: [Opaque(), ops.Bias(6).double(), ops.GELU()],
         "shapes behind Opaque (op 0) are unknown, as its formula cannot be asked without data: give Opaque a method "
         "infer"),
    Case("linear_cross_entropy", lambda: [linear(), ops.CrossEntropy()], extras=(I64,)),
    Case("linear_cross_entropy", lambda: [linear(bias=False), ops.CrossEntropy("sum", z_loss=0.1)], extras=(I64,)),
    Case("linear_cross_entropy", lambda: [linear(), ops.CrossEntropy("none")], extras=(I64,), grad=False),
    Case("linear_cross_entropy", lambda: [ops.Linear(6, 6), ops.CrossEntropy()], x=BF16, extras=(I64,)),
    Case("linear_cross_entropy", lambda: [linear(), ops.CrossEntropy("none")],
         'with reduction="none" the logits would be made twice: reduce the loss, by "mean" or "sum"', extras=(I64,)),
    *[Case("dropout_add", lambda p=p: [ops.Dropout(p), ops.AddExtraInput()], extras=(F64,)) for p in (0.3, 0.0, 1.0)],
    Case("dropout_add", lambda: [ops.Dropout(0.3), ops.AddExtraInput()], TWO_DTYPES, extras=(F32,)),
    *[Case(rule, lambda p=p, norm=norm: [ops.Dropout(p), ops.AddExtraInput(), norm(6).double()], extras=(F64,))
      for rule in ("dropout_add_norm", "ddropout_add_norm") for p in (0.3, 0.0, 1.0)
      for norm in (ops.RMSNorm, ops.LayerNorm)],
    *[Case(rule, lambda: [ops.Dropout(0.3), ops.AddExtraInput(), ops.MakeExtraOutput(), ops.LayerNorm((3, 6)).double()],
           extras=(F64,)) for rule in ("dropout_add_norm", "ddropout_add_norm")],
    *[Case(rule, lambda: [ops.Dropout(0.3), ops.AddExtraInput(), ops.RMSNorm(6).double()], TWO_DTYPES, extras=(F32,))
      for rule in ("dropout_add_norm", "ddropout_add_norm")],
    *[Case("gated_mlp", lambda act=act: [linear(bias=False), act(), ops.Linear(3, 6, bias=False).double()])
      for act in (ops.SwiGLU, ops.GEGLU, ops.QGEGLU, ops.ReGLU, ops.SReGLU, ops.GLU, ops.ClampedSwiGLU, ops.SiTUGLU)],
    Case("gated_mlp", lambda: [linear(bias=False), ops.SwiGLU(), ops.Linear(3, 6, bias=False).double()],
         "no backward will run, so there is nothing to keep less of: call it with gradients wanted", grad=False),
    Case("gated_mlp", lambda: [linear(bias=False), ops.SwiGLU(), ops.Linear(3, 6, bias=False).double()],
         "x and both weights differ in dtype, or autocast does: give all of them one dtype", x=F32),
]  # fmt: skip


def prepared(case: Case) -> tuple[list, list[Tensor]]:
    torch.manual_seed(9)
    chain = case.chain()
    for module in chain:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, 0.1, 0.5)
    case.change(chain)
    return chain, [
        torch.randint(0, 6, (3,)) if dtype is I64 else torch.randn(3, 6, dtype=F64).to(dtype)
        for dtype in (case.x, *case.extras)
    ]


def reasons(block: fusible.Sequential, rule: object, *inputs: Tensor) -> list[str]:
    """Why a rule that nearly applied did not."""
    misses = [row for part in block.explain(*inputs).parts for row in part.misses]
    own = [row for row in misses if (row.direction, row.rule) == (rule.direction, rule.name)]
    return [str(refusal) for row in own for refusal in row.refusals]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule + ("-refused" if case.text else ""))
def test_shipped_rule(case):
    chain, inputs = prepared(case)
    rule = SHIPPED[case.rule]
    with torch.set_grad_enabled(case.grad), kernels.use(case.backend) if case.backend else contextlib.nullcontext():
        if not case.text:
            check_rule(rule, chain, *inputs)
            return
        block = fusible.Sequential(*chain, rules=(rule,))
        asked = [t.requires_grad_(t.is_floating_point()) for t in inputs]
        assert case.text in reasons(block, rule, *asked)
        with pytest.raises(RuntimeError, match="is not fully fused: .*" + re.escape(case.text)):
            block.explain(*asked, strict=True)
        check(block, *inputs, layouts=False)
        with pytest.raises(AssertionError, match=f"rule {rule.name} did not fire: .*" + re.escape(case.text)):
            check_rule(rule, chain, *inputs)


@pytest.mark.quick
def test_every_shipped_rule_fires_and_is_refused():
    assert {case.rule for case in CASES if not case.text} == set(SHIPPED)
    assert {case.rule for case in CASES if case.text} == set(SHIPPED)
    assert set(rules.DEFAULT) < set(rules.LEAN) < set(SHIPPED.values())
    for name, rule in SHIPPED.items():
        assert rule.name == name
        assert rule.__doc__, f"{name} has no docstring"
        assert pickle.loads(pickle.dumps(rule)) is copy.deepcopy(rule) is rule


# -- rules of users ----------------------------------------------------------------------------------------------------


@forward
def two_of_a_kind(first: BasicLinear, a: Bias | None, second: BasicLinear, /, x, w1, b, w2):
    """Two slots of one type, and an optional one whose parameter comes as None."""
    hidden = x @ w1.t() if b is None else x @ w1.t() + b
    return Out(hidden @ w2.t(), first=BasicLinear.Saved(x), second=BasicLinear.Saved(hidden))


@backward
def two_activations(first: SiLU | GELU, second: ReLU, /, first_saved, second_saved, dy):
    """Either of two types."""
    return first.bwd(first_saved, second.bwd(second_saved, dy).values[0])


@backward
def add_and_make(add: AddExtraInput, make: MakeExtraOutput, /, add_saved, make_saved, dy=None, d_extra=None):
    """An extra input's and an extra output's gradient, each of which may be absent."""
    if dy is None or d_extra is None:
        total = d_extra if dy is None else dy
        return Grads(total, total)
    return Grads(dy + d_extra, dy + d_extra)


@forward
def add_and_make_forward(add: AddExtraInput, make: MakeExtraOutput, /, x, extra):
    y = x + extra
    return Out(y, y)


@forward
def short_alternative(op: BasicLinear | Bias | GELU, /, x, parameter):
    """The shortest alternative gets None for the parameter that it lacks."""
    if parameter is None:
        return Out(kernels.gelu(x), op=GELU.Saved(x))
    return Out(x @ parameter.t(), op=BasicLinear.Saved(x)) if parameter.dim() == 2 else Out(x + parameter)


@rewrite
def scale_pair(first: ops.ConstantScale, second: ops.ConstantScale, /):
    """One op for two."""
    return ops.ConstantScale(first.scale * second.scale)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("rule", "chain", "extras"),
    [
        (two_of_a_kind, lambda: [ops.BasicLinear(6, 5), ops.Bias(5), ops.BasicLinear(5, 4)], 0),
        (two_of_a_kind, lambda: [ops.BasicLinear(6, 5), ops.BasicLinear(5, 4)], 0),
        (two_activations, lambda: [ops.SiLU(), ops.ReLU()], 0),
        (two_activations, lambda: [ops.GELU(), ops.ReLU()], 0),
        (add_and_make, lambda: [ops.AddExtraInput(), ops.MakeExtraOutput()], 1),
        (add_and_make_forward, lambda: [ops.AddExtraInput(), ops.MakeExtraOutput()], 1),
        (short_alternative, lambda: [ops.GELU(), ops.Linear(6, 3)], 0),
        (scale_pair, lambda: [ops.ConstantScale(0.5), ops.ConstantScale(3.0)], 0),
    ],
)
def test_patterns(rule, chain, extras):
    modules = [module.double() for module in chain()]
    check_rule(rule, modules, *[torch.randn(3, 6, dtype=F64) for _ in range(1 + extras)])


def steps(block: fusible.Sequential, *inputs: Tensor) -> list[str]:
    part = block.explain(*inputs).parts[0]
    return [row.rule for row in (*part.forward, *part.backward) if row.rule]


@forward
def mine(linear: BasicLinear, bias: Bias, /, x, weight, b):
    return Out(x @ weight.t() + b, linear=BasicLinear.Saved(x))


@pytest.mark.quick
def test_which_rules_apply():
    """Earlier rules win; `use_rules` wins over `rules=`, the innermost first."""
    block = fusible.Sequential(ops.Linear(6, 6), ops.GELU())
    x = torch.randn(3, 6, requires_grad=True)
    assert steps(block, x) == ["linear_bias", "bias_activation"]
    assert steps(fusible.Sequential(*block, rules=(mine, *rules.DEFAULT)), x) == ["mine", "bias_activation"]
    assert steps(fusible.Sequential(*block, rules=(*rules.DEFAULT, mine)), x) == ["linear_bias", "bias_activation"]
    with use_rules((mine,)):
        assert steps(block, x) == ["mine"]
        with use_rules(rules.NONE):
            assert steps(block, x) == []
        assert steps(block, x) == ["mine"]
    assert steps(block, x) == ["linear_bias", "bias_activation"]


@pytest.mark.quick
def test_a_backward_uses_its_forwards_rules_wherever_it_runs():
    """No row: what ran is counted."""
    ran = []

    @backward
    def counted(act: GELU, /, act_saved, dy):
        ran.append(1)
        return act.bwd(act_saved, dy)

    block = fusible.Sequential(ops.GELU())
    x = torch.randn(3, 6, requires_grad=True)
    with use_rules((counted,)):
        inside = block(x)
    outside = block(x)
    with use_rules(rules.NONE):
        inside.sum().backward()
    assert ran == [1]
    with use_rules((counted,)):
        outside.sum().backward()
    assert ran == [1]


@pytest.mark.quick
def test_use_rules_is_of_its_thread():
    """No row: two threads."""
    block = fusible.Sequential(ops.Linear(6, 6), ops.GELU())
    x = torch.randn(3, 6, requires_grad=True)
    seen = []
    with use_rules(rules.NONE):
        thread = threading.Thread(target=lambda: seen.append(steps(block, x)))
        thread.start()
        thread.join()
        assert steps(block, x) == []
    assert seen == [["linear_bias", "bias_activation"]]


@pytest.mark.quick
def test_sets():
    both = (mine,) + rules.DEFAULT  # noqa: RUF005 - `+` is what is tested
    assert isinstance(both, RuleSet)
    assert both[0] is mine
    assert len(rules.DEFAULT + rules.DEFAULT) == len(rules.DEFAULT)
    assert RuleSet([]) == rules.NONE
    assert pickle.loads(pickle.dumps(rules.LEAN)) == rules.LEAN
    assert copy.deepcopy(both) == both
    assert repr(RuleSet([mine])) == "RuleSet(mine)"
    assert repr(mine) == "<forward rule mine: BasicLinear, Bias>"


@pytest.mark.quick
def test_a_rule_does_not_reach_over_a_channel_of_its_own_run():
    """No row: the refusal is the matcher's, not a rule's."""

    @forward
    def made_and_read(make: MakeExtraOutput, add: AddExtraInput, /, x, extra):
        raise AssertionError

    block = fusible.Sequential(ops.MakeExtraOutput("a"), ops.AddExtraInput("a"), rules=(made_and_read,))
    reason = "AddExtraInput (op 1) reads what MakeExtraOutput (op 0) makes inside the run"
    assert reasons(block, made_and_read, torch.ones(3)) == [reason]
    check(block, torch.randn(3, 6))


@pytest.mark.quick
def test_a_rule_that_forgets_must_cope_with_absent_gradients():
    """No row: as above."""

    @backward(forgets=("linear.x",))
    def forgetful(make: MakeExtraOutput, linear: BasicLinear, /, make_saved, linear_saved, dy, d_extra, weight):
        raise AssertionError

    block = fusible.Sequential(ops.MakeExtraOutput(), ops.BasicLinear(6, 6), rules=(forgetful,))
    text = "it forgets a record, but some gradient that it wants may not arrive: let that default to None"
    assert reasons(block, forgetful, torch.ones(3, 6, requires_grad=True)) == [text]
    check(block, torch.randn(3, 6))


@pytest.mark.quick
def test_what_a_rule_forgets_arrives_as_none_and_is_not_kept():
    """No row: what is kept is counted."""
    x = torch.randn(50, 8, requires_grad=True)
    modules = [ops.Linear(8, 16), ops.GELU(), ops.Linear(16, 8)]
    sets = (rules.NONE, rules.DEFAULT, rules.LEAN)
    with kernels.use("reference"):
        none, default, lean = (fusible.Sequential(*modules, rules=rules).explain(x).kept_bytes for rules in sets)
    assert none == default == lean + 50 * 16 * 4
    if library.load():
        assert fusible.Sequential(*modules).explain(x).kept_bytes == lean


# -- what users get wrong ----------------------------------------------------------------------------------------------

SUBJECT = "rule broken on Linear (op 0), Linear (op 0)"


def forward_returning(result: Callable[..., object]) -> object:
    @forward
    def broken(linear: BasicLinear, bias: Bias, /, x, weight, b):
        return result(x, x @ weight.t() + b)

    return broken


def backward_returning(result: Callable[..., object]) -> object:
    @backward
    def broken(linear: BasicLinear, bias: Bias, /, linear_saved, bias_saved, dy, weight, b):
        return result(dy @ weight, dy.t() @ linear_saved.x, dy.sum(0))

    return broken


S = BasicLinear.Saved
INFER = "but infer says torch.float64 with [6]; one of them is wrong"
RETURNS = [
    (forward_returning(lambda x, y: Out(y)),
     "lacks the record of Linear (op 0); return Out(..., linear=BasicLinear.Saved(x))"),
    (forward_returning(lambda x, y: Out(y, linear=S(x), act=S(x))),
     "returned a record for 'act'; there is only linear, bias"),
    (forward_returning(lambda x, y: Out(y, linear=GELU.Saved(x))),
     "the record of Linear (op 0) must be BasicLinear.Saved, got GELU.Saved"),
    (forward_returning(lambda x, y: y), "forward must return Out(y, ...), got Tensor"),
    (forward_returning(lambda x, y: Out(y, y, linear=S(x))),
     "forward must return y and 0 extra outputs, all tensors, it returned (Tensor, Tensor)"),
    (forward_returning(lambda x, y: Out(None, linear=S(x))),
     "forward must return y and 0 extra outputs, all tensors, it returned (NoneType)"),
    (forward_returning(lambda x, y: Out(y.float(), linear=S(x))),
     "forward returned torch.float32 with last dimension [6], " + INFER),
    (forward_returning(lambda x, y: Out(y[..., :2], linear=S(x))),
     "forward returned torch.float64 with last dimension [2], " + INFER),
    (backward_returning(lambda dx, dw, db: Grads(dx, linear={"weight": dw}, bias={"bias": db}, act={"g": db})),
     "returned gradients for 'act'; there is only linear, bias"),
    (backward_returning(lambda dx, dw, db: Grads(dx, linear={"weights": dw}, bias={"bias": db})),
     "returned a gradient of Linear (op 0) for 'weights'; there is only weight"),
    (backward_returning(lambda dx, dw, db: Grads(dx, linear={"weight": dw})),
     "returned no gradient for bias of Linear (op 0), though it is wanted"),
    (backward_returning(lambda dx, dw, db: Grads(dx, linear={"weight": None}, bias={"bias": db})),
     "returned no gradient for weight of Linear (op 0), though it is wanted"),
    (backward_returning(lambda dx, dw, db: Grads(None, linear={"weight": dw}, bias={"bias": db})),
     "returned no gradient for x, though it is wanted"),
    (backward_returning(lambda dx, dw, db: Grads(dx, dx, linear={"weight": dw}, bias={"bias": db})),
     "backward must return dx and 0 gradients of extra inputs, it returned 2 gradients"),
    (backward_returning(lambda dx, dw, db: Grads(dx, linear={"weight": dw.t()[:, :2]}, bias={"bias": db})),
     "the gradient of weight of Linear (op 0) has shape [6, 2], the parameter [6, 6]"),
    (backward_returning(lambda dx, dw, db: (dx, dw, db)), "backward must return Grads(dx, ...), got tuple"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("rule", "text"), RETURNS, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_rule_that_returns_the_wrong_thing(rule, text):
    block = fusible.Sequential(linear(), rules=(rule,))
    x = torch.randn(3, 6, dtype=F64, requires_grad=True)
    with pytest.raises(TypeError) as caught:
        block(x).sum().backward()
    assert str(caught.value) == f"{SUBJECT}: {text}"
    assert x.grad is None


def no_slots(x, weight):
    pass


def all_optional(linear: BasicLinear | None, /, x, weight):
    pass


def no_op(linear: torch.nn.Linear, /, x, weight):
    pass


def no_annotation(linear, /, x, weight):
    pass


def short(linear: BasicLinear, bias: Bias, /, x, weight):
    pass


def short_backward(make: MakeExtraOutput, linear: BasicLinear, /, saved, dy, weight):
    pass


def long_rewrite(linear: BasicLinear, /, x):
    pass


def forgets_nothing_known(linear: BasicLinear, /, saved, dy, weight):
    pass


@pytest.mark.quick
@pytest.mark.parametrize(
    ("make", "function", "text"),
    [
        (forward, no_slots, "rule no_slots has no slots: put the ops that it matches before a '/', as in def "
         "no_slots(linear: BasicLinear, act: GELU, /, ...)"),
        (forward, all_optional, "rule all_optional has optional slots only; at least one must be required"),
        (forward, no_op, f"rule no_op: slot linear must be annotated with an op class, got {torch.nn.Linear!r}"),
        (backward, no_annotation, "rule no_annotation: slot linear must be annotated with an op class, got None"),
        (forward, short, "rule short must take 3 arguments after the slots (x, 2 parameters), it takes 2: (x, weight)"),
        (backward, short_backward, "rule short_backward must take 5 arguments after the slots (2 records, dy, "
         "gradients of extra outputs, parameters), it takes 3: (saved, dy, weight)"),
        (rewrite, long_rewrite, "rule long_rewrite must take 0 arguments after the slots (none), it takes 1: (x)"),
        (backward(forgets=("linear.y",)), forgets_nothing_known,
         "rule forgets_nothing_known forgets 'linear.y', but no slot of it has that field; write 'slot.field'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_rule_that_does_not_fit_raises_when_it_is_made(make, function, text):
    with pytest.raises(TypeError) as caught:
        make(function)
    assert str(caught.value) == text


@pytest.mark.quick
def test_a_set_refuses_what_is_no_rule_and_equal_names():
    with pytest.raises(TypeError, match="rules must be made by @forward, @backward or @rewrite, got 3"):
        fusible.Sequential(ops.GELU(), rules=(3,))
    with pytest.raises(TypeError, match="rules must be made by @forward, @backward or @rewrite, got <function no_s"):
        use_rules((no_slots,)).__enter__()
    other = forward_returning(lambda x, y: y)
    with pytest.raises(ValueError, match="two rules are called broken; rule names are unique in a set"):
        RuleSet([other, forward_returning(lambda x, y: y)])


class Swapped(Op):
    """Takes an extra input that the ops it replaces do not have."""

    num_extra_inputs = 1

    def reference(self, x, extra):
        return x + extra


class Owner(Op):
    """Has a parameter of its own, where it should borrow."""

    def __init__(self):
        super().__init__()
        self.g = torch.nn.Parameter(torch.ones(6))

    def reference(self, x, g):
        return x * g


@pytest.mark.quick
@pytest.mark.parametrize(
    ("result", "text"),
    [
        (3, "a rewrite must return an op, got 3"),
        (Swapped(), "Swapped must have 0 extra inputs and 0 extra outputs, as the ops it replaces, got 1 and 0"),
        (Owner(), "the new op may only borrow its slots' parameters"),
    ],
    ids=["no op", "extra input", "own parameter"],
)
def test_a_rewrite_that_returns_the_wrong_op(result, text):
    @rewrite
    def broken(first: GELU, second: ReLU, /):
        return result

    block = fusible.Sequential(ops.GELU(), ops.ReLU(), rules=(broken,))
    with pytest.raises(TypeError) as caught:
        block(torch.ones(3, 6))
    assert str(caught.value).endswith(text)
    assert "broken" in str(caught.value)


@pytest.mark.quick
def test_unknown_needs_and_keeps_raise():
    """No row: a typing error in `env.needs` must not be a silent no."""

    @forward
    def asks(linear: BasicLinear, /, x, weight, *, env):
        assert env.needs.x
        assert env.needs.linear.weight
        return env.needs.linear.wieght

    block = fusible.Sequential(ops.BasicLinear(6, 6), rules=(asks,))
    with pytest.raises(AttributeError, match="no 'wieght' here; there are weight"):
        block(torch.ones(3, 6, requires_grad=True))


@pytest.mark.quick
def test_parameters_that_a_rule_does_not_read_are_not_kept():
    """No row: `reads_for` shows in what is saved."""

    @backward
    def without_weight(linear: BasicLinear, /, linear_saved, dy, weight=reads_for("x"), *, env):
        assert (weight is None) is not env.needs.x
        return Grads(None if weight is None else dy @ weight, linear={"weight": dy.t() @ linear_saved.x})

    block = fusible.Sequential(ops.BasicLinear(6, 6), rules=(without_weight,))
    for wants in (True, False):
        y = block(torch.ones(3, 6, requires_grad=wants))
        assert len(y.grad_fn.saved_tensors) == 1 + wants
        y.sum().backward()
