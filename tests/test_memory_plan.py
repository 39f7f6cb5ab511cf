"""`fusible.memory_plan`: its figures against what PyTorch's profiler sees of a real call, and its report."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fusible
from fusible import executable, kernels, memory, ops, rules

ROWS = 512
MIB = 1 << 20


def mlp() -> list:
    return [ops.LayerNorm(128), ops.Linear(128, 512), ops.GELU(), ops.Linear(512, 128)]


def gated_mlp() -> list:
    return [ops.RMSNorm(128), ops.Linear(128, 688, bias=False), ops.SwiGLU(), ops.Linear(344, 128, bias=False)]


def residuals() -> list:
    return [ops.Residual(*mlp()) for _ in range(4)]


def x(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, 128, requires_grad=True)


def memory_of(function) -> tuple[object, int, int]:
    """What it returns, the peak of what it allocates, and what of that stays, as the allocator reports it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return result, max(itertools.accumulate(sizes), default=0), sum(sizes)


def measured(block: fusible.Sequential, given: torch.Tensor) -> dict[str, int]:
    """Bytes kept, and the peaks of both passes, of a real call."""
    leaves = [given, *block.parameters()]
    block(given).sum().backward()  # what a first call makes and keeps is made
    y, forward_peak, stays = memory_of(lambda: block(given))
    kept, shape, dtype = stays - y.untyped_storage().nbytes(), y.shape, y.dtype
    edges = [torch.autograd.graph.get_gradient_edge(y)]
    del y

    def backward() -> tuple:
        return torch.autograd.grad([edges.pop()], leaves, [torch.ones(shape, dtype=dtype)])

    _, backward_peak, _ = memory_of(backward)
    return {"kept_bytes": kept, "forward_peak": forward_peak, "backward_peak": kept + backward_peak}


@pytest.fixture
def one_allocator(monkeypatch):
    """All memory from torch's allocator, which the profiler sees, and steps that hold nothing on their way."""
    monkeypatch.setattr(executable, "CHECK_ALWAYS", False)
    memory.pool_outputs(False)
    yield
    memory.pool_outputs(True)


@pytest.mark.parametrize("make", [mlp, gated_mlp, residuals])
@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({}, "cpu"),
        ({"rules": rules.NONE}, "cpu"),
        ({"rules": rules.LEAN}, "reference"),
        ({"memory_budget": 0.05}, "cpu"),
        ({"memory_budget": 0.3}, "reference"),
    ],
    ids=["default", "none", "lean", "tight", "budget"],
)
def test_measured_memory_agrees_with_the_plan(make, options, backend, one_allocator):
    with kernels.use(backend):
        block, given = fusible.Sequential(*make(), **options), x()
        plan, found = fusible.memory_plan(block, given), measured(block, given)
    for name, size in found.items():
        assert getattr(plan, name) == pytest.approx(size, rel=0.05, abs=MIB / 64), name


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_intermediates_are_those_of_the_kernels(backend, one_allocator):
    """Not a case of the above, since norms meet no budget: kernels of ours have no intermediates, formulas have."""
    with kernels.use(backend):
        block, given = fusible.Sequential(ops.SReLU(), ops.RMSNorm(128)).bfloat16(), x().detach().bfloat16()
        plan, found = fusible.memory_plan(block, given.requires_grad_()), measured(block, given)
    for name, size in found.items():
        assert getattr(plan, name) == pytest.approx(size, rel=0.05, abs=MIB / 64), name


def test_a_smaller_budget_is_measured_smaller(one_allocator):
    found = [measured(fusible.Sequential(*residuals(), memory_budget=budget), x()) for budget in (1.0, 0.3, 0.05)]
    for name in ("kept_bytes", "forward_peak"):
        sizes = [sizes[name] for sizes in found]
        assert sizes == sorted(sizes, reverse=True), name
        assert sizes[-1] < 0.6 * sizes[0], name
    assert found[1]["backward_peak"] < found[0]["backward_peak"]


def test_kept_tensors_are_those_of_explain():
    block = fusible.Sequential(*residuals())
    plan = fusible.memory_plan(block, x())
    (chain,) = plan.chains
    assert chain.kept == block.explain(x()).parts[0].kept
    assert plan.kept_bytes == chain.kept_bytes == block.explain(x()).kept_bytes
    assert plan.unfused_bytes == fusible.Sequential(*block, rules=rules.NONE).explain(x()).kept_bytes
    assert chain.output_bytes == 4 * ROWS * 128
    notes = [row.note for row in chain.kept]
    assert "the caller's" in notes
    assert all(row.bytes == 0 for row in chain.kept if row.note)


@pytest.mark.quick
def test_what_recomputation_saves_is_what_it_then_saves():
    with kernels.use("reference"):
        block = fusible.Sequential(*mlp(), memory_budget=0.8)
        base = fusible.memory_plan(fusible.Sequential(*block), x())
        chosen = [row for row in fusible.memory_plan(block, x()).chains[0].recomputations if row.chosen]
        plan = fusible.memory_plan(block, x())
    assert [(row.how, row.product) for row in chosen] == [("activation_linear_recompute", False)]
    assert base.kept_bytes - plan.kept_bytes == chosen[0].saves == 4 * ROWS * 512
    assert chosen[0].ops.endswith("2 GELU, 3 BasicLinear")
    assert all(row.seconds > 0 for row in base.chains[0].recomputations)
    hows = {row.how for row in base.chains[0].recomputations}
    assert {"activation_linear_recompute", "norm_linear_recompute", "checkpoint"} <= hows


@pytest.mark.quick
def test_products_cost_more_than_passes():
    with kernels.use("reference"):
        rows = fusible.memory_plan(fusible.Sequential(*gated_mlp()), x()).chains[0].recomputations
    passes = [row.seconds for row in rows if row.how == "activation_linear_recompute"]
    products = [row.seconds for row in rows if row.product]
    assert max(passes) < min(products)
    assert "gated_mlp" in {row.how for row in rows}


@pytest.mark.quick
def test_nothing_runs():
    block = fusible.Sequential(ops.Linear(8, 8), ops.Dropout(0.5), ops.GELU())
    given, state = torch.randn(3, 8, requires_grad=True), torch.get_rng_state()
    fusible.memory_plan(block, given)
    assert torch.equal(state, torch.get_rng_state())
    fuser, values = block.single_chain(given)
    assert not fuser.find(values, block.rules)[0].checked


@pytest.mark.quick
def test_without_gradients_nothing_is_kept():
    with torch.no_grad():
        plan = fusible.memory_plan(fusible.Sequential(*mlp()), x())
    assert plan.kept_bytes == plan.backward_peak == 0
    assert plan.chains[0].recomputations == ()
    assert plan.forward_peak == 4 * ROWS * (512 + 128)


@pytest.mark.quick
def test_a_split_block_is_planned_chain_by_chain():
    block = fusible.Sequential(*mlp(), torch.nn.Softplus(), *mlp())
    plan = fusible.memory_plan(block, x())
    assert len(plan.chains) == 2
    assert plan.kept_bytes == sum(chain.kept_bytes for chain in plan.chains)
    assert plan.forward_peak >= plan.chains[0].kept_bytes + plan.chains[1].forward_peak


class Hidden(fusible.Op):
    """An op whose shapes cannot be told without data."""

    def reference(self, x):
        return x[..., : int(x.detach().sum() * 0) + 4]


@pytest.mark.quick
def test_an_op_that_needs_data_says_so():
    plan = fusible.memory_plan(fusible.Sequential(Hidden()), x())
    assert plan.chains[0].reason == "not known: an op's formula cannot be asked without data"
    assert "not known" in str(plan)


@pytest.mark.quick
def test_an_ops_own_graph_is_counted():
    class Cube(fusible.Op):
        def reference(self, x):
            return x.exp() * x

    plan = fusible.memory_plan(fusible.Sequential(ops.Linear(128, 128), Cube()), x())
    assert plan.kept_bytes >= 2 * 4 * ROWS * 128  # x and its exponential


@pytest.mark.quick
def test_it_shows_as_text_as_tables_and_as_data():
    block = fusible.Sequential(*residuals(), memory_budget=0.3)
    plan = fusible.memory_plan(block, x())
    text = str(plan)
    assert text.startswith("memory of Sequential on x [512, 128] float32 on cpu; gradients of x, 24 parameters")
    assert "peak of forward" in text
    assert "not calibrated" in text
    assert "memory budget 0.3: " in text
    page = plan._repr_html_()
    assert page.count("<tr>") == len(plan.chains[0].kept) + len(plan.chains[0].recomputations) + 2
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["kept_bytes"] == plan.kept_bytes
    assert data["chains"][0]["recomputations"][0]["saves"] == plan.chains[0].recomputations[0].saves


@pytest.mark.quick
def test_importing_fusible_does_not_load_it():
    lines = "import sys, fusible; print([n for n in ('memory_report', 'budget') if 'fusible.' + n in sys.modules])"
    run = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
