"""`Sequential(memory_budget=...)`: what is computed again, that it is right, and how it fails."""

from __future__ import annotations

import copy
import pickle

import blocks
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusible
from fusible import Grads, Out, calibration, kernels, ops, rules, segments, use_rules
from fusible.options import repeats
from fusible.testing import check


def layer() -> ops.Residual:
    return ops.Residual(ops.RMSNorm(32), ops.Linear(32, 128), ops.GELU(), ops.Linear(128, 32))


def stack(count: int, **options) -> fusible.Sequential:
    return fusible.Sequential(*[layer() for _ in range(count)], **options)


def x(rows: int = 64, width: int = 32) -> torch.Tensor:
    return torch.randn(rows, width, requires_grad=True)


def chosen(block: fusible.Sequential, *inputs: torch.Tensor) -> list[tuple[str, bool]]:
    """(how, whether a product is computed again) of each recomputation that a block does."""
    rows = fusible.memory_plan(block, *inputs).chains[0].recomputations
    return [(row.how, row.product) for row in rows if row.chosen]


# -- right -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "budget", "backend"),
    [
        ("mlp", 0.3, "reference"),
        ("mlp", 0.0, "cpu"),
        ("gated_mlp", 0.3, "cpu"),
        ("relu_mlp", 0.5, "cpu"),
        ("without_biases", 0.6, "reference"),
        ("post_norm", 0.6, "cpu"),
        ("dropouts", 0.5, "cpu"),
        ("split", 0.5, "cpu"),
        ("reshaped", 0.6, "cpu"),
    ],
)
def test_standard_blocks_are_right_under_a_budget(name, budget, backend):
    block = fusible.Sequential(*blocks.BLOCKS[name](), memory_budget=budget).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.5)
    with kernels.use(backend):
        check(block, *blocks.inputs(name))
        notes = [
            n for part in block.explain(*[t.requires_grad_() for t in blocks.inputs(name)]).parts for n in part.notes
        ]
    assert any(note.startswith("computed again: ") for note in notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_and_autocast_are_right(dtype):
    given = blocks.inputs("mlp", torch.float32)[0]
    block = fusible.Sequential(*blocks.BLOCKS["mlp"](), memory_budget=0.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
        check(block.to(dtype), given.to(dtype))


@pytest.mark.quick
def test_checkpoints_and_retained_graphs():
    block, given = stack(2, memory_budget=0.2), x()
    right = torch.autograd.grad(stack_like(block)(given).square().sum(), given)[0]
    y = block(given).square().sum()
    for _ in range(2):
        assert torch.allclose(torch.autograd.grad(y, given, retain_graph=True)[0], right, atol=1e-5)
    for reentrant in (False, True):
        y = checkpoint(block, given, use_reentrant=reentrant).square().sum()
        y.backward()
        assert torch.allclose(given.grad, right, atol=1e-5)
        given.grad = None


def stack_like(block: fusible.Sequential) -> fusible.Sequential:
    """The same parameters with nothing fused."""
    return fusible.Sequential(*block, rules=rules.NONE)


@pytest.mark.quick
def test_what_is_read_again_must_not_have_changed():
    block, given = stack(1, memory_budget=0.0), x()
    y = block(given)
    block[0][0].eps = 0.5
    with pytest.raises(RuntimeError, match=r"Checkpoint \(op 0\): eps was .* in forward and is 0.5 now, in backward"):
        y.sum().backward()
    changed = given * 1.0
    y = block(changed)
    changed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = block(given)
    with torch.no_grad():
        block[0][1].bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Noise(fusible.Op):
    """Draws random numbers in `fwd`, and inherits nothing that says it may run twice."""

    class Saved(fusible.Saved):
        noise: torch.Tensor

    def reference(self, x):
        return x * torch.rand_like(x)

    def fwd(self, x):
        noise = torch.rand_like(x)
        return Out(x * noise, saved=Noise.Saved(noise))

    def bwd(self, saved, dy):
        return Grads(dy * saved.noise)


class Restless(ops.GELU):
    """A user's op that inherits from one that may run twice."""

    def fwd(self, x):
        return super().fwd(x + torch.rand_like(x))


@pytest.mark.quick
@pytest.mark.parametrize("op", [Noise(), ops.Dropout(0.5), Restless()])
def test_random_ops_are_never_run_again(op):
    block = fusible.Sequential(ops.Linear(32, 32), op, ops.Linear(32, 32))
    for row in fusible.memory_plan(block, x()).chains[0].recomputations:
        if row.how == "checkpoint":
            assert type(op).__name__ not in row.ops


@pytest.mark.quick
def test_which_ops_may_run_again():
    """All but those that may draw random numbers, and those at the ends of a model, behind which nothing is gained."""
    kinds = [getattr(ops, name) for name in ops.__all__]
    kinds = [kind for kind in kinds if issubclass(kind, fusible.Op) and kind.expand is fusible.Op.expand]
    never = {ops.Attention, ops.Dropout, ops.Embedding, ops.CrossEntropy, ops.LinearCrossEntropy}
    assert {kind for kind in kinds if not repeats(kind)} == never


def test_attention_stays_and_what_is_around_it_runs_again():
    torch.manual_seed(0)
    layer = [
        ops.Residual(
            ops.RMSNorm(16), ops.Linear(16, 32), ops.QKNorm(8, 2, 1), ops.Rotary(8, 3), ops.Attention(2, 1, causal=True)
        ),
        ops.Residual(ops.RMSNorm(16), ops.Linear(16, 64), ops.SwiGLU(), ops.Linear(32, 16)),
        ops.PositionEmbedding(9, 16),
    ]
    block, given = fusible.Sequential(*layer, memory_budget=0.6), torch.randn(2, 5, 16, requires_grad=True)
    assert any(row.chosen for row in fusible.memory_plan(block, given).chains[0].recomputations)
    check(block, given)


# -- chosen ------------------------------------------------------------------------------------------------------------


def test_only_as_many_as_needed_are_computed_again():
    with kernels.use("reference"):
        block = stack(8, memory_budget=0.82)
        plan = fusible.memory_plan(block, x())
    hows = [row for row in plan.chains[0].recomputations if row.chosen]
    assert {(row.how, row.product) for row in hows} == {("activation_linear_recompute", False)}
    hidden = 4 * 64 * 128
    assert len(hows) == -(-(plan.unfused_bytes - 0.82 * plan.unfused_bytes) // hidden)
    assert 0.82 * plan.unfused_bytes - hidden < plan.kept_bytes <= 0.82 * plan.unfused_bytes


@pytest.mark.quick
def test_products_are_computed_again_only_where_passes_do_not_do():
    with kernels.use("reference"):
        assert not any(product for _, product in chosen(stack(2, memory_budget=0.6), x()))
        assert any(product for _, product in chosen(stack(2, memory_budget=0.3), x()))
        block = fusible.Sequential(ops.Linear(32, 64, bias=False), ops.SwiGLU(), ops.Linear(32, 32, bias=False))
        assert chosen(fusible.Sequential(*block, memory_budget=0.7), x()) == [("activation_linear_recompute", False)]


@pytest.mark.quick
def test_passes_come_before_products_that_cost_nothing():
    free = calibration.Calibration({}, "", ((1, 1e9),), ((1, 1e9),), {"float32": ((1, 1e20),)}, {}, 1e-9)
    layers = [
        m for _ in range(2) for m in (ops.Linear(32, 128, bias=False), ops.GELU(), ops.Linear(128, 32, bias=False))
    ]
    block = fusible.Sequential(*layers, memory_budget=0.55)
    with kernels.use("reference"), calibration.use(free):
        rows = fusible.memory_plan(block, x()).chains[0].recomputations
    passes = [row for row in rows if row.chosen]
    assert [row.product for row in passes] == [False, False]
    saves, seconds = sum(row.saves for row in passes), sum(row.seconds for row in passes)
    assert any(row.product and row.saves >= saves and row.seconds < seconds for row in rows)


@pytest.mark.quick
def test_the_last_product_is_not_computed_again():
    block = stack(1, memory_budget=0.0)
    for backend in ("reference", "cpu"):
        with kernels.use(backend):
            (forward,), (backward,) = block.explain(x()).parts[0].forward, block.explain(x()).parts[0].backward
        assert "gemm_add" in forward.kernels
        assert "gemm_add" not in backward.kernels
        assert backward.kernels.count("gemm") == 1 + 4  # one for the records, four for gradients
    if "(cpu)" in backward.kernels:  # the gradient's pass makes its output again
        assert " gelu (" not in backward.kernels


@pytest.mark.quick
def test_rules_that_are_torn_cost_passes():
    with kernels.use("reference"):
        rows = fusible.memory_plan(stack(1), x(4096)).chains[0].recomputations
    seconds = {row.ops: row.seconds for row in rows if row.how == "activation_linear_recompute"}
    assert seconds["0.2 GELU, 0.3 BasicLinear"] > 1.2 * seconds["0.1 Bias, 0.2 GELU, 0.3 BasicLinear"]


@pytest.mark.quick
def test_a_generous_budget_changes_nothing():
    block, plain = stack(2, memory_budget=1.0), stack(2)
    parts, plains = block.explain(x()).parts, plain.explain(x()).parts
    assert parts[0].source == plains[0].source
    assert parts[0].notes[-1].startswith("memory budget 1.0: nothing is computed again; ")


@pytest.mark.quick
def test_explain_says_what_is_computed_again():
    with kernels.use("reference"):
        notes = stack(2, memory_budget=0.75).explain(x()).parts[0].notes
    assert notes[0].startswith("memory budget 0.75: 58.0%")
    assert notes[0].endswith(" of what is kept unfused (100.0% without it)")
    assert notes[1] == ("computed again: 0.1 Bias, 0.2 GELU, 0.3 BasicLinear by activation_linear_recompute, "
                        "no matrix product")  # fmt: skip
    assert len(notes) == 3


@pytest.mark.quick
def test_a_fraction_plans_without_rows():
    block = stack(2, memory_budget=0.3)
    for rows in (1, 7, 64, 0):
        block(x(rows)).sum().backward()
    assert len(block.single_chain(x())[0].plans) == 1
    kept = [block.explain(x(rows)).parts[0].kept for rows in (7, 64)]
    assert [row.op for row in kept[0]] == [row.op for row in kept[1]]


@pytest.mark.quick
def test_freezing_moves_no_budget():
    block = stack(2, memory_budget=0.3)
    whole = fusible.memory_plan(block, x()).unfused_bytes
    block[0].requires_grad_(False)
    assert fusible.memory_plan(block, x().detach()).unfused_bytes == whole
    block(x().detach()).sum().backward()


@pytest.mark.quick
def test_bytes_are_met_for_every_number_of_rows_of_a_class():
    block = stack(2, memory_budget=200_000)
    kept = {}
    for rows in (16, 103, 105, 200):
        plan = fusible.memory_plan(block, x(rows))
        kept[rows] = plan.kept_bytes
        assert plan.kept_bytes <= 200_000
        block(x(rows)).sum().backward()
    assert kept[200] < 200 / 105 * kept[105]
    assert "bytes at 112 rows" in block.explain(x(105)).parts[0].notes[0]
    fuser = block.single_chain(x())[0]
    assert {rules_.rows for rules_ in fuser.by_rules} == {16, 104, 112, 208}


@pytest.mark.quick
def test_other_rules_are_used_under_the_budget():
    block = stack(2, memory_budget=0.3)
    with use_rules(rules.LEAN):
        assert fusible.memory_plan(block, x()).kept_bytes <= 0.3 * fusible.memory_plan(block, x()).unfused_bytes
        assert block.rules_in_force() is block.rules_in_force()
        block(x()).sum().backward()
    with use_rules(rules.NONE):
        assert block.explain(x()).parts[0].notes == ("no rules: every op runs its own fwd and bwd",)
    with use_rules(block.rules):
        assert fusible.memory_plan(stack(2), x()).chains[0].budget


# -- the container -----------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_copies_slices_and_sums_keep_the_budget():
    block = stack(2, memory_budget=0.3, rules=rules.LEAN)
    assert block.memory_budget == 0.3
    assert stack(2).memory_budget is None
    copies = (
        copy.deepcopy(block),
        pickle.loads(pickle.dumps(block)),
        block[:1],
        block + stack(1),
        block * 2,
        2 * block,
    )
    for other in copies:
        assert other.memory_budget == 0.3
        assert tuple(other.rules) == tuple(rules.LEAN)
        assert other.rules == block.rules
    assert block.rules != rules.LEAN
    assert "0.3" in repr(block.rules)


@pytest.mark.quick
def test_a_block_with_a_budget_of_its_own_stays_a_block():
    outer = fusible.Sequential(stack(1, memory_budget=0.0), layer())
    assert "rules of its own" in outer.explain(x()).unfused[0]
    outer(x()).sum().backward()


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("budget", "error", "text"),
    [
        (True, TypeError, r"got True \(bool\)"),
        (
            "0.5",
            TypeError,
            r"memory_budget must be a fraction up to 1, as 0.5, or a number of bytes, as 200 \* 2\*\*20, ",
        ),
        (1, ValueError, "got 1; write 1.0 for a fraction"),
        (1.5, ValueError, "got 1.5; bytes must be an int"),
        (-0.1, ValueError, "got -0.1"),
        (float("nan"), ValueError, "got nan"),
    ],
)
def test_what_is_no_budget_raises(budget, error, text):
    with pytest.raises(error, match=text):
        stack(1, memory_budget=budget)


@pytest.mark.quick
def test_a_budget_that_cannot_be_met_raises_before_anything_runs():
    block = fusible.Sequential(ops.Linear(32, 32), ops.Dropout(0.5), ops.Linear(32, 32), memory_budget=0.1)
    given, state = x(), torch.get_rng_state()
    with pytest.raises(ValueError, match=(
        r"memory_budget=0.1 for ops 0, 1, 2: at most 10.0% of the bytes that they keep for backward unfused may be "
        r"kept, but the least that computing again reaches is 100.0%; give a budget of 1.0 or more"
    )):  # fmt: skip
        block(given)
    assert torch.equal(state, torch.get_rng_state())
    block = fusible.Sequential(*block, memory_budget=1000)
    with pytest.raises(ValueError, match=(
        r"memory_budget=1000 for ops 0, 1, 2: at most 1000 bytes may be kept for backward, but at 64 rows the least "
        r"that computing again reaches is \d+; give \d+ bytes or more, or fewer rows"
    )):  # fmt: skip
        block(x())


@pytest.mark.quick
def test_an_op_that_needs_data_cannot_be_budgeted():
    class Hidden(fusible.Op):
        def reference(self, x):
            return x[..., : int(x.detach().sum() * 0) + 4]

    with pytest.raises(ValueError, match=r"memory_budget=0.5 for ops 0: .* cannot be told before it runs"):
        fusible.Sequential(Hidden(), memory_budget=0.5)(x())


# -- beside the rest ---------------------------------------------------------------------------------------------------


def test_a_long_chain_of_several_nodes_is_right_under_a_budget(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    block = fusible.Sequential(*blocks.BLOCKS["mlp"](), *blocks.BLOCKS["mlp"](), memory_budget=0.3)
    with kernels.use("reference"):
        check(block, blocks.inputs("mlp", torch.float32)[0])
        notes = block.explain(blocks.inputs("mlp", torch.float32)[0].requires_grad_()).parts[0].notes
    assert any("autograd nodes" in note for note in notes)
    assert any(note.startswith("computed again: ") for note in notes)


@pytest.mark.quick
def test_gradients_that_are_accumulated_elsewhere_are_in_no_checkpoint():
    block = fusible.Sequential(
        ops.Linear(32, 128, accumulate_into_main_grad=True),
        ops.GELU(),
        ops.Linear(128, 32),
        ops.Tanh(),
        ops.Linear(32, 32),
    )
    rows = fusible.memory_plan(block, x()).chains[0].recomputations
    assert not any("0 BasicLinear" in row.ops for row in rows if row.how == "checkpoint")
    block = fusible.Sequential(*block, memory_budget=0.7)
    for parameter in block[0].parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    block(x()).sum().backward()
    assert block[0].weight.main_grad.abs().sum() > 0
